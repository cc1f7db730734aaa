//! Peers that know the secret but do not keep to the protocol.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{Communicator, Departure, MAX_CONTRIBUTION},
    auth::{self, Verdict},
    frame::{Frame, HEADER, Kind, encode},
    *,
};

const LIMIT: Duration = Duration::from_secs(10);

fn secret() -> Secret {
    Secret::new("the secret of these tests").unwrap()
}

fn config(rank: usize, world_size: usize, port: u16) -> TcpConfig {
    TcpConfig {
        rank,
        world_size,
        local_rank: rank,
        address: "127.0.0.1".into(),
        port,
        secret: Some(secret()),
        timeout: LIMIT,
    }
}

fn bytes(frames: impl IntoIterator<Item = Frame>) -> Vec<u8> {
    let mut blocks = Vec::new();
    encode(frames, &mut blocks);
    blocks.concat()
}

/// A header that announces `length` bytes; none follow.
fn announcing(kind: Kind, length: u32) -> Vec<u8> {
    let mut header = bytes([Frame::bare(kind)]);
    header[HEADER - 4..].copy_from_slice(&length.to_le_bytes());
    header
}

fn contribution(sequence: u64) -> Frame {
    Frame {
        sequence,
        ..Frame::bare(Kind::Contribution)
    }
}

/// A port taken and given back; the member tries again should rank 0 not get it at once.
fn free_port() -> u16 {
    let probe = TcpListener::bind("127.0.0.1:0").unwrap();
    probe.local_addr().unwrap().port()
}

/// Connects as `rank` of 3 up to the start, and hands over the bare stream.
fn raw_member(rank: u32, port: u16) -> TcpStream {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port))
            && auth::present(&stream, &secret(), (rank, 3), deadline).is_ok()
        {
            return stream;
        }
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(2));
    }
}

/// Reads until the peer closes.
fn closes(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A member that sends `sent` is disconnected and lost for rank 0 and for member 2.
fn member_is_lost(sent: &[u8]) {
    let port = free_port();
    thread::scope(|scope| {
        let others = [0, 2].map(|rank| {
            scope.spawn(move || {
                let end = Communicator::tcp(config(rank, 3, port)).unwrap();
                let error = end.barrier().unwrap_err();
                assert!(matches!(error, Error::PeerLost { .. }), "{error}");
                assert_eq!(end.liveness().departure(Rank(1)), Some(Departure::Lost));
                // Kept until both have seen it.
                end
            })
        });
        let mut raw = raw_member(1, port);
        raw.write_all(sent).unwrap();
        closes(&raw);
        let others = others.map(|other| other.join().unwrap());
        drop(others);
    });
}

#[test]
fn a_member_that_breaks_the_protocol_is_lost() {
    let too_long = MAX_CONTRIBUTION as u32 + 1;
    member_is_lost(&announcing(Kind::Contribution, too_long));
    member_is_lost(&announcing(Kind::Contribution, u32::MAX));
    member_is_lost(&announcing(Kind::Bye, 1));
    member_is_lost(&bytes([contribution(1)]));
    member_is_lost(&bytes([contribution(u64::MAX)]));
    member_is_lost(&bytes([contribution(0), contribution(0)]));
    member_is_lost(&bytes([Frame::about(Kind::Gone, Rank(2), [1])]));
    member_is_lost(&bytes([Frame::bare(Kind::Start)]));
    member_is_lost(&[0xff; 100]);
}

#[test]
fn a_contribution_that_stops_half_way_is_a_missing_one() {
    let port = free_port();
    thread::scope(|scope| {
        let zero = scope.spawn(move || {
            let zero = Communicator::tcp(config(0, 3, port)).unwrap();
            zero.set_timeout(Duration::from_millis(300));
            zero.barrier().unwrap_err()
        });
        let two = scope.spawn(move || {
            let two = Communicator::tcp(config(2, 3, port)).unwrap();
            (two.barrier().unwrap_err(), two)
        });
        let mut raw = raw_member(1, port);
        let mut sent = announcing(Kind::Contribution, 1000);
        sent.extend([0; 500]);
        raw.write_all(&sent).unwrap();
        for error in [zero.join().unwrap(), two.join().unwrap().0] {
            match &error {
                Error::Timeout { ranks, .. } | Error::Aborted { ranks, .. } => {
                    assert_eq!(*ranks, [Rank(1)], "{error}");
                }
                other => panic!("{other}"),
            }
        }
    });
}

/// Plays rank 0 for one member of 3: admits it, starts it, and sends `sent`.
fn hub_is_lost(sent: &[u8]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(move || {
            let end = Communicator::tcp(config(1, 3, port)).unwrap();
            let error = end.barrier().unwrap_err();
            assert!(matches!(error, Error::PeerLost { .. }), "{error}");
            assert_eq!(end.liveness().departure(Rank(0)), Some(Departure::Lost));
        });
        let (mut stream, _) = listener.accept().unwrap();
        let deadline = Instant::now() + LIMIT;
        let applicant = auth::receive(&stream, &secret(), deadline).ok().unwrap();
        assert_eq!((applicant.rank, applicant.size), (1, 3));
        let known = secret();
        let admitted = Verdict::Admitted;
        auth::answer(&stream, &applicant, Some(&known), admitted, "", deadline).unwrap();
        // In one piece, so that frames come together with the start.
        let start = bytes([Frame::bare(Kind::Start)]);
        stream.write_all(&[&start, sent].concat()).unwrap();
        closes(&stream);
    });
}

#[test]
fn a_hub_that_breaks_the_protocol_is_lost() {
    let gathered = |rank, sequence| Frame {
        sequence,
        ..Frame::about(Kind::Gathered, Rank(rank), [7])
    };
    hub_is_lost(&bytes([gathered(3, 0)]));
    hub_is_lost(&bytes([gathered(0, 9)]));
    hub_is_lost(&bytes([gathered(0, 0), gathered(0, 0)]));
    hub_is_lost(&announcing(Kind::Gathered, MAX_CONTRIBUTION as u32 + 1));
    hub_is_lost(&announcing(Kind::Abort, 4 * 3 + 1));
    hub_is_lost(&bytes([Frame::about(Kind::Gone, Rank(0), [0])]));
    hub_is_lost(&bytes([Frame::about(Kind::Gone, Rank(1), [0])]));
    hub_is_lost(&bytes([Frame::about(
        Kind::Gone,
        Rank(u32::MAX as usize),
        [0],
    )]));
    hub_is_lost(&bytes([contribution(0)]));
    hub_is_lost(&[0xff; 100]);
}

#[test]
fn a_false_rank_0_learns_nothing_and_is_not_believed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let member = thread::spawn(move || {
        let mut config = config(1, 3, port);
        config.timeout = Duration::from_millis(500);
        Communicator::tcp(config).unwrap_err().to_string()
    });
    // It cannot check the proof, and claims to admit the member nevertheless.
    listener.set_nonblocking(true).unwrap();
    while !member.is_finished() {
        let Ok((mut stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        let mut hello = [0; 52];
        stream.read_exact(&mut hello).unwrap();
        let challenge = [&hello[..12], &[9; 32]].concat();
        stream.write_all(&challenge).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        let verdict = [[0; 4].as_slice(), &proof].concat();
        let _ = stream.write_all(&verdict);
    }
    let error = member.join().unwrap();
    assert!(error.contains("does not know the secret"), "{error}");
}

#[test]
fn versions_that_differ_are_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let member = thread::spawn(move || Communicator::tcp(config(1, 3, port)));
    let (mut stream, _) = listener.accept().unwrap();
    let mut hello = [0; 52];
    stream.read_exact(&mut hello).unwrap();
    hello[8] += 1;
    stream.write_all(&hello[..44]).unwrap();
    let error = member.join().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("protocol version 2, this rank has 1"),
        "{error}"
    );
}

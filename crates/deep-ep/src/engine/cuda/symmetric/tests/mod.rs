//! The protocol of growth with pretended memory; [`gpu`] has the real one.

mod gpu;
mod waiting;

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::Instant,
};

use rustix::{
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
    net::{
        AddressFamily, SocketFlags, SocketType, socketpair, sockopt::set_socket_send_buffer_size,
    },
};

use super::{
    owner::Peer,
    record::{ANSWER_BYTES, Answer, OFFER_BYTES, Offer},
    *,
};
use crate::memory::exchange::socket::{Record, receive_record, send_record};

const UNIT: u64 = 4096;
const RESERVED: u64 = 1 << 30;
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);

/// Memory that only counts: a chunk is a file of its size.
#[derive(Debug, Default)]
struct Fake {
    grown: Mutex<u64>,
    /// By rank.
    imported: Mutex<BTreeMap<usize, u64>>,
    /// Larger chunks are not to be had.
    largest: Option<u64>,
    /// Nothing can be mapped.
    broken: bool,
}

impl Memory for Fake {
    fn grow(&self, bytes: u64) -> Result<Option<OwnedFd>> {
        if self.largest.is_some_and(|largest| bytes > largest) {
            return Err(Error::OutOfMemory {
                purpose: PURPOSE,
                requested: bytes,
                limit: 7,
            });
        }
        *self.grown.lock().unwrap() += bytes;
        Ok(Some(file(bytes)))
    }

    fn import(&self, peer: Rank, bytes: u64, file: OwnedFd) -> Result<()> {
        // Each offer came with its own file.
        assert_eq!(fstat(&file).unwrap().st_size as u64, bytes);
        if self.broken {
            return Err(Error::invalid("the device", "x".repeat(500), "is broken"));
        }
        *self.imported.lock().unwrap().entry(peer.0).or_default() += bytes;
        Ok(())
    }
}

fn file(bytes: u64) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// Two ends of a connection.
fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn owner(peers: Vec<Peer>) -> Owner {
    Owner {
        unit: UNIT,
        reserved: RESERVED,
        mapped: 0,
        peers,
    }
}

fn source(rank: usize, socket: OwnedFd) -> Source {
    Source {
        rank: Rank(rank),
        socket,
        mapped: 0,
        reserved: RESERVED,
        unit: UNIT,
    }
}

/// An owner with one peer, rank 1, whose part the test plays.
fn owner_and_peer() -> (Owner, Fake, OwnedFd) {
    let (socket, other) = pair();
    let owner = owner(vec![Peer::new(Rank(1), socket)]);
    (owner, Fake::default(), other)
}

/// The next record, waited for.
fn next<const N: usize>(socket: &OwnedFd) -> Option<([u8; N], Vec<OwnedFd>)> {
    let start = Instant::now();
    loop {
        match receive_record(socket) {
            Record::Nothing => thread::sleep(Duration::from_millis(1)),
            Record::Closed => return None,
            Record::Whole(bytes, files) => return Some((bytes, files)),
            Record::Other => panic!("a record of another length"),
        }
        assert!(start.elapsed() < LONG, "nothing came");
    }
}

fn answer(socket: &OwnedFd, end: u64) {
    let answer = Answer { end, refused: None };
    send_record(socket, &answer.encode(), None).unwrap();
}

#[test]
fn all_ranks_grow_at_the_same_time() {
    const RANKS: usize = 4;
    let memories: Vec<_> = (0..RANKS).map(|_| Arc::new(Fake::default())).collect();
    let mut sources: Vec<_> = (0..RANKS).map(|_| vec![]).collect();
    let mut connect = |rank: usize, peer: usize| {
        let (to, from) = pair();
        sources[peer].push(source(rank, from));
        Peer::new(Rank(peer), to)
    };
    let mut owners: Vec<_> = (0..RANKS)
        .map(|rank| {
            let peers = (0..RANKS).filter(|&peer| peer != rank);
            owner(peers.map(|peer| connect(rank, peer)).collect())
        })
        .collect();
    let services: Vec<_> = sources
        .into_iter()
        .enumerate()
        .map(|(rank, sources)| Service::start(memories[rank].clone(), sources).unwrap())
        .collect();
    thread::scope(|scope| {
        for (rank, owner) in owners.iter_mut().enumerate() {
            let memories = &memories;
            scope.spawn(move || {
                let mut wanted = 0;
                for step in 0..50 {
                    wanted += 1 + (step * 7919 + rank as u64 * 104_729) % (5 * UNIT);
                    let committed = owner.commit(&*memories[rank], wanted, LONG).unwrap();
                    assert_eq!(committed, wanted.next_multiple_of(UNIT));
                    assert_eq!(*memories[rank].grown.lock().unwrap(), committed);
                    for (peer, memory) in memories.iter().enumerate() {
                        let imported = memory.imported.lock().unwrap().get(&rank).copied();
                        assert_eq!(imported, (peer != rank).then_some(committed));
                    }
                }
            });
        }
    });
    let start = Instant::now();
    drop(services);
    assert!(start.elapsed() < Duration::from_secs(4));
    // All peers are gone now, so nobody is waited for.
    assert_eq!(
        owners[0].commit(&*memories[0], RESERVED, LONG).unwrap(),
        RESERVED
    );
}

#[test]
fn a_peer_that_dies_before_it_answers_is_not_waited_for() {
    let (mut owner, memory, peer) = owner_and_peer();
    thread::scope(|scope| {
        let committing = scope.spawn(|| owner.commit(&memory, 3 * UNIT, LONG));
        let (offer, files) = next::<OFFER_BYTES>(&peer).unwrap();
        let offer = Offer::decode(&offer).unwrap();
        assert_eq!((offer.offset, offer.bytes, files.len()), (0, 3 * UNIT, 1));
        drop(peer);
        assert_eq!(committing.join().unwrap().unwrap(), 3 * UNIT);
    });
    assert_eq!(owner.commit(&memory, 4 * UNIT, LONG).unwrap(), 4 * UNIT);
}

#[test]
fn a_silent_peer_is_named_and_may_answer_later() {
    let (mut owner, memory, peer) = owner_and_peer();
    for bytes in [1, 1, UNIT + 1] {
        let error = owner.commit(&memory, bytes, SHORT).unwrap_err();
        assert!(
            matches!(&error, Error::Timeout { ranks, waited, .. } if ranks == &[Rank(1)] && *waited >= SHORT),
            "{error}"
        );
    }
    answer(&peer, UNIT);
    let error = owner.commit(&memory, 1, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    answer(&peer, 2 * UNIT);
    assert_eq!(owner.commit(&memory, 1, SHORT).unwrap(), 2 * UNIT);
    // Waiting again made nothing anew.
    assert_eq!(*memory.grown.lock().unwrap(), 2 * UNIT);
}

#[test]
fn offers_that_find_no_room_are_sent_later() {
    const OFFERS: u64 = 60;
    let (socket, peer) = pair();
    // Room for a few records: the kernel's least.
    set_socket_send_buffer_size(&socket, 1).unwrap();
    let mut owner = owner(vec![Peer::new(Rank(1), socket)]);
    let memory = Fake::default();
    for n in 1..=OFFERS {
        owner.commit(&memory, n * UNIT, Duration::ZERO).unwrap_err();
    }
    let importer = Arc::new(Fake::default());
    let _service = Service::start(importer.clone(), vec![source(0, peer)]).unwrap();
    let committed = owner.commit(&memory, UNIT, LONG).unwrap();
    assert_eq!(committed, OFFERS * UNIT);
    assert_eq!(importer.imported.lock().unwrap()[&0], committed);
}

#[test]
fn a_peer_that_answers_nonsense_is_named() {
    let refusal = Answer {
        end: UNIT,
        refused: Some("no more addresses".into()),
    };
    let other = Answer {
        end: 2 * UNIT,
        refused: None,
    };
    let cases: [(&[u8], &str); 4] = [
        (&refusal.encode(), "no more addresses"),
        (&other.encode(), "not asked"),
        (&[b'x'; ANSWER_BYTES], "not asked"),
        (&[b'x'; 9], "invalid record"),
    ];
    for (record, why) in cases {
        let (mut owner, memory, peer) = owner_and_peer();
        send_record(&peer, record, None).unwrap();
        // Twice, because it stays so.
        for _ in 0..2 {
            let error = owner.commit(&memory, 1, LONG).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Bootstrap { .. }), "{text}");
            assert!(text.contains("rank 1") && text.contains(why), "{text}");
        }
        assert_eq!(*memory.grown.lock().unwrap(), UNIT);
    }
}

#[test]
fn a_peer_that_cannot_map_says_why() {
    let (mut owner, memory, peer) = owner_and_peer();
    let broken = Arc::new(Fake {
        broken: true,
        ..Fake::default()
    });
    let _service = Service::start(broken, vec![source(0, peer)]).unwrap();
    let error = owner.commit(&memory, 1, LONG).unwrap_err();
    assert!(error.to_string().contains("the device is xxx"), "{error}");
}

#[test]
fn what_is_not_to_be_had_changes_nothing() {
    let (mut owner, mut memory, peer) = owner_and_peer();
    memory.largest = Some(UNIT);
    answers(&mut owner, &memory, &peer, UNIT);
    for (bytes, wanted, limit) in [
        (3 * UNIT, 3 * UNIT, 7),
        (RESERVED + 1, RESERVED + 1, RESERVED),
        (u64::MAX, u64::MAX, RESERVED),
    ] {
        match owner.commit(&memory, bytes, LONG).unwrap_err() {
            Error::OutOfMemory {
                purpose,
                requested,
                limit: said,
            } => assert_eq!((purpose, requested, said), (PURPOSE, wanted, limit)),
            other => panic!("{other}"),
        }
    }
    answers(&mut owner, &memory, &peer, 2 * UNIT);
}

/// Grows by one unit, which the peer maps.
fn answers(owner: &mut Owner, memory: &Fake, peer: &OwnedFd, end: u64) {
    thread::scope(|scope| {
        let committing = scope.spawn(|| owner.commit(memory, end, LONG));
        let (offer, _) = next::<OFFER_BYTES>(peer).unwrap();
        assert_eq!(Offer::decode(&offer).unwrap().end(), Some(end));
        answer(peer, end);
        assert_eq!(committing.join().unwrap().unwrap(), end);
    });
}

/// What a service makes of an offer when 2 units are mapped: its answer, or `None` if it closed.
fn served(record: &[u8], file: Option<BorrowedFd<'_>>) -> (Option<Answer>, Arc<Fake>) {
    let (to, from) = pair();
    let memory = Arc::new(Fake::default());
    let source = Source {
        mapped: 2 * UNIT,
        ..source(3, from)
    };
    let _service = Service::start(memory.clone(), vec![source]).unwrap();
    send_record(&to, record, file).unwrap();
    let answer = next::<ANSWER_BYTES>(&to).map(|(bytes, _)| Answer::decode(&bytes).unwrap());
    (answer, memory)
}

#[test]
fn only_the_next_part_of_a_region_is_mapped() {
    let chunk = file(UNIT);
    let offer = |offset, bytes| Offer { offset, bytes };
    let good = offer(2 * UNIT, UNIT);
    let (answer, memory) = served(&good.encode(), Some(chunk.as_fd()));
    assert_eq!(answer.unwrap().refused, None);
    assert_eq!(memory.imported.lock().unwrap()[&3], UNIT);
    let refused = [
        (offer(UNIT, UNIT), Some(chunk.as_fd()), "offset is 4096"),
        (
            offer(3 * UNIT, UNIT),
            Some(chunk.as_fd()),
            "offset is 12288",
        ),
        (offer(2 * UNIT, 0), Some(chunk.as_fd()), "size is 0"),
        (
            offer(2 * UNIT, UNIT + 1),
            Some(chunk.as_fd()),
            "size is 4097",
        ),
        (
            offer(2 * UNIT, RESERVED),
            Some(chunk.as_fd()),
            "within 1073741824",
        ),
        (
            offer(2 * UNIT, UNIT.wrapping_neg()),
            Some(chunk.as_fd()),
            "within",
        ),
        (good, None, "number of files is 0"),
    ];
    for (offer, file, why) in refused {
        let (answer, memory) = served(&offer.encode(), file);
        let said = answer.unwrap().refused.unwrap();
        assert!(said.contains(why), "{said}");
        assert!(memory.imported.lock().unwrap().is_empty());
    }
}

#[test]
fn an_owner_that_sends_something_else_is_cut_off() {
    let chunk = file(UNIT);
    for record in [&[b'x'; OFFER_BYTES][..], &[0; 3], &[b'x'; 60_000]] {
        for file in [None, Some(chunk.as_fd())] {
            let (answer, memory) = served(record, file);
            assert_eq!(answer, None);
            assert!(memory.imported.lock().unwrap().is_empty());
        }
    }
}

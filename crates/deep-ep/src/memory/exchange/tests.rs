use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            net::{SocketAddr, UnixStream},
            process::CommandExt,
        },
    },
    process::{Command, Stdio},
    sync::{Barrier, Mutex},
    thread,
    time::Instant,
};

use rustix::io::Errno;

use super::{
    card::Card,
    meeting::{RETRY, STRANGERS},
    socket::{Greeting, Kind, Received},
    *,
};
use crate::memory::region::Backing;

/// An all_gather between threads.
struct Board {
    cards: Mutex<Vec<Vec<u8>>>,
    all_here: Barrier,
}

impl Board {
    fn new(ranks: usize) -> Self {
        Self {
            cards: Mutex::new(vec![Vec::new(); ranks]),
            all_here: Barrier::new(ranks),
        }
    }

    fn gather(&self, rank: usize, message: &[u8]) -> Vec<Vec<u8>> {
        self.cards.lock().unwrap()[rank] = message.to_vec();
        self.all_here.wait();
        self.cards.lock().unwrap().clone()
    }
}

fn region() -> Arc<Region> {
    let region = Region::new(Backing::Memfd, 64 << 20).unwrap();
    region.commit(2 << 20).unwrap();
    Arc::new(region)
}

fn store(ptr: *mut u8, value: u8) {
    // SAFETY: a committed byte of a region that only this test uses.
    unsafe { ptr.write_volatile(value) }
}

fn load(ptr: *mut u8) -> u8 {
    // SAFETY: as in `store`.
    unsafe { ptr.read_volatile() }
}

/// Runs `ranks` ranks as threads; `before` runs on each between gathering and meeting, with all
/// cards.
fn meet(
    ranks: usize,
    timeout: Duration,
    before: &(dyn Fn(usize, &[Vec<u8>]) + Sync),
) -> Vec<(Arc<Region>, Result<Vec<Window>>)> {
    let board = Board::new(ranks);
    let domain: Vec<_> = (0..ranks).map(Rank).collect();
    thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .map(|rank| {
                let (board, domain) = (&board, &domain);
                scope.spawn(move || {
                    let region = region();
                    let exchange = Exchange {
                        rank: Rank(rank),
                        domain,
                        region: &region,
                        timeout,
                    };
                    let result = exchange.run(&|message| {
                        let cards = board.gather(rank, message);
                        before(rank, &cards);
                        Ok(cards)
                    });
                    (region, result)
                })
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap())
            .collect()
    })
}

const LONG: Duration = Duration::from_secs(60);

/// Every rank stores a byte of its own into every region and finds everybody's in its own.
fn assert_connected(met: Vec<(Arc<Region>, Result<Vec<Window>>)>) {
    let ranks = met.len();
    for (rank, (_, windows)) in met.iter().enumerate() {
        let windows = windows.as_ref().unwrap();
        assert_eq!(windows.len(), ranks);
        assert!(matches!(windows[rank], Window::Local(_)));
        for window in windows {
            store(window.checked(rank as u64, 1).unwrap(), rank as u8 + 1);
            assert!(window.checked(2 << 20, 1).is_err());
        }
    }
    for (region, _) in &met {
        for rank in 0..ranks {
            assert_eq!(load(region.ptr(rank as u64, 1).unwrap()), rank as u8 + 1);
        }
    }
}

#[test]
fn ranks_connect_in_any_order() {
    for round in 0..6 {
        assert_connected(meet(4, LONG, &|rank, _| {
            thread::sleep(Duration::from_millis(
                ((rank * 7 + round * 5) % 4) as u64 * 15,
            ));
        }));
    }
    assert_connected(meet(1, Duration::ZERO, &|_, _| {}));
}

#[test]
fn strangers_do_not_disturb() {
    let kept = Mutex::new(Vec::new());
    let strange = |rank: usize, cards: &[Vec<u8>]| {
        if rank != 0 {
            return;
        }
        let cards: Vec<_> = cards
            .iter()
            .map(|card| Card::decode(card).unwrap())
            .collect();
        for card in &cards {
            // Half-open connections, more than the list holds.
            for _ in 0..STRANGERS + 40 {
                kept.lock()
                    .unwrap()
                    .push(socket::connect_to(&card.name).unwrap());
            }
            // Garbage of several lengths, and requests with a wrong token on either side.
            let garbage = socket::connect_to(&card.name).unwrap();
            for len in [1, 8, socket::GREETING_BYTES, 60_000] {
                let bytes = vec![b'x'; len];
                let flags = rustix::net::SendFlags::NOSIGNAL;
                rustix::net::send(&garbage, &bytes, flags).unwrap();
            }
            for (to_token, from_token) in [
                (card::Token([0; 32]), cards[1].token),
                (card.token, card::Token([0; 32])),
            ] {
                let request = Greeting {
                    kind: Kind::Request,
                    from: 1,
                    to_token,
                    from_token,
                };
                let socket = socket::connect_to(&card.name).unwrap();
                socket::send(&socket, &request, Some(socket.as_fd())).unwrap();
                kept.lock().unwrap().push(socket);
            }
            // A stream socket cannot connect to a record socket at all.
            let name = SocketAddr::from_abstract_name(&card.name).unwrap();
            assert!(UnixStream::connect_addr(&name).is_err());
        }
    };
    assert_connected(meet(4, LONG, &strange));
    for socket in kept.into_inner().unwrap() {
        assert!(matches!(socket::receive(&socket), Received::Closed));
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let met = meet(4, Duration::from_millis(300), &|rank, cards| {
        if rank != 2 {
            return;
        }
        for card in [&cards[0], &cards[1], &cards[3]] {
            let name = Card::decode(card).unwrap().name;
            while socket::connect_to(&name).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        }
    });
    for (rank, (_, result)) in met.iter().enumerate() {
        match result.as_ref().unwrap_err() {
            Error::Timeout { ranks, waited, .. } if rank != 2 => {
                assert_eq!(ranks, &[Rank(2)]);
                assert!(*waited >= Duration::from_millis(300));
            }
            // The late rank finds that the others have gone.
            Error::PeerLost { ranks, .. } if rank == 2 => {
                assert_eq!(ranks, &[Rank(0), Rank(1), Rank(3)]);
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
}

#[test]
fn a_rank_that_went_away_is_named_at_once() {
    let start = Instant::now();
    let board = Board::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let card = Card::new(64 << 20).unwrap();
            let listener = socket::listen_on(&card.name).unwrap();
            board.gather(1, &card.encode());
            thread::sleep(Duration::from_millis(50));
            drop(listener);
        });
        let region = region();
        let exchange = Exchange {
            rank: Rank(0),
            domain: &[Rank(0), Rank(1)],
            region: &region,
            timeout: LONG,
        };
        let error = exchange
            .run(&|message| Ok(board.gather(0, message)))
            .unwrap_err();
        assert!(
            matches!(&error, Error::PeerLost { ranks, .. } if ranks == &[Rank(1)]),
            "{error}"
        );
    });
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// What rank 0 of 2 says when rank 1 shows this card.
fn run_against(change: impl Fn(&mut Card)) -> Error {
    let region = region();
    let exchange = Exchange {
        rank: Rank(0),
        domain: &[Rank(0), Rank(1)],
        region: &region,
        timeout: LONG,
    };
    exchange
        .run(&|message| {
            let mut other = Card::decode(message).unwrap();
            change(&mut other);
            Ok(vec![message.to_vec(), other.encode()])
        })
        .unwrap_err()
}

#[test]
fn ranks_elsewhere_are_named() {
    let error = run_against(|card| card.host.boot_id[0] ^= 1);
    let message = "rank 1 runs on another host";
    assert!(
        matches!(&error, Error::Unsupported { why, .. } if why == message),
        "{error}"
    );
    let error = run_against(|card| card.host.namespace.1 += 1);
    let message = "rank 1 runs on another network namespace";
    assert!(error.to_string().contains(message), "{error}");
    let error = run_against(|card| card.uid += 1);
    assert!(error.to_string().contains("rank 1 runs as user"), "{error}");
}

#[test]
fn missing_or_short_cards_are_an_error() {
    let region = region();
    let exchange = Exchange {
        rank: Rank(0),
        domain: &[Rank(0), Rank(1)],
        region: &region,
        timeout: LONG,
    };
    for card in [None, Some(vec![]), Some(vec![0; card::CARD_BYTES])] {
        let error = exchange
            .run(&|message| {
                let mut cards = vec![message.to_vec()];
                cards.extend(card.clone());
                Ok(cards)
            })
            .unwrap_err();
        assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
    }
    let private = Arc::new(Region::new(Backing::Anonymous, 1 << 21).unwrap());
    let exchange = Exchange {
        region: &private,
        ..exchange
    };
    assert!(exchange.run(&|_| panic!("gathered")).is_err());
}

#[test]
fn a_peer_that_sends_the_wrong_thing_is_named() {
    let file = || Region::new(Backing::Memfd, 64 << 20).unwrap();
    let exe = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let exe: OwnedFd = exe.into();
    // (reserve on the card, files sent): a size that is none; no memfd; no file at all.
    let good = file();
    let cases = [
        (12345, good.file()),
        (64 << 20, Some(exe.as_fd())),
        (64 << 20, None),
    ];
    for (reserve, file) in cases {
        let board = Board::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let card = Card::new(reserve).unwrap();
                let listener = socket::listen_on(&card.name).unwrap();
                let cards = board.gather(1, &card.encode());
                let other = Card::decode(&cards[0]).unwrap();
                let socket = loop {
                    match socket::accept_from(&listener).unwrap() {
                        Some(socket) => break socket,
                        None => thread::sleep(RETRY),
                    }
                };
                // An unread request would reset the connection when this end closes.
                while matches!(socket::receive(&socket), Received::Nothing) {}
                let reply = Greeting {
                    kind: Kind::Reply,
                    from: 1,
                    to_token: other.token,
                    from_token: card.token,
                };
                socket::send(&socket, &reply, file).unwrap();
            });
            let region = region();
            let exchange = Exchange {
                rank: Rank(0),
                domain: &[Rank(0), Rank(1)],
                region: &region,
                timeout: LONG,
            };
            let error = exchange
                .run(&|message| Ok(board.gather(0, message)))
                .unwrap_err();
            assert!(
                matches!(&error, Error::Bootstrap { reason, .. } if reason.starts_with("rank 1: ")),
                "{error}"
            );
        });
    }
}

const STRANGER: &str = "DEEP_EP_TEST_STRANGER";

#[test]
fn child_of_another_user() {
    if let Ok(name) = std::env::var(STRANGER) {
        let error = socket::connect_to(name.as_bytes()).unwrap_err();
        assert_eq!(error, Errno::PERM);
    }
}

#[test]
fn another_user_is_turned_away_on_both_sides() {
    if !rustix::process::geteuid().is_root() {
        return; // Only root can start a process of another user.
    }
    let card = Card::new(1 << 21).unwrap();
    let listener = socket::listen_on(&card.name).unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::exchange::tests::child_of_another_user"])
        .env(STRANGER, String::from_utf8(card.name.clone()).unwrap())
        .uid(65534)
        .status();
    match status {
        Ok(status) => assert!(status.success()),
        // The test program lies where others cannot run it.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return,
        Err(error) => panic!("{error}"),
    }
    assert!(socket::accept_from(&listener).unwrap().is_none());
}

const CHILD: &str = "DEEP_EP_TEST_EXCHANGE";

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = text.trim();
    (0..digits.len() / 2)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

fn exchange_of_two(
    rank: usize,
    region: &Arc<Region>,
    all_gather: AllGather<'_>,
) -> Result<Vec<Window>> {
    let domain = [Rank(0), Rank(1)];
    let exchange = Exchange {
        rank: Rank(rank),
        domain: &domain,
        region,
        timeout: LONG,
    };
    exchange.run(all_gather)
}

#[test]
fn child_exchanges_and_waits() {
    if std::env::var(CHILD).is_err() {
        return;
    }
    // A test that fails leaves no process behind.
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).unwrap();
    let windows = exchange_of_two(1, &region(), &|own| {
        println!("card {}", to_hex(own));
        let mut other = String::new();
        std::io::stdin().read_line(&mut other).unwrap();
        Ok(vec![from_hex(&other), own.to_vec()])
    })
    .unwrap();
    store(windows[0].checked(5, 1).unwrap(), 55);
    store(windows[1].checked(6, 1).unwrap(), 66);
    println!("stored");
    loop {
        thread::park();
    }
}

#[test]
fn processes_share_memory_which_outlives_a_killed_one() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .arg("memory::exchange::tests::child_exchanges_and_waits")
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let input = RefCell::new(child.stdin.take().unwrap());
    let lines = RefCell::new(BufReader::new(child.stdout.take().unwrap()).lines());
    let said = |word: &str| {
        let mut lines = lines.borrow_mut();
        lines
            .find_map(|line| Some(line.unwrap().split_once(word)?.1.to_owned()))
            .unwrap()
    };
    let own = region();
    let windows = exchange_of_two(0, &own, &|message| {
        writeln!(input.borrow_mut(), "{}", to_hex(message)).unwrap();
        Ok(vec![message.to_vec(), from_hex(&said("card "))])
    })
    .unwrap();
    said("stored");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(load(own.ptr(5, 1).unwrap()), 55);
    let peer = windows[1].checked(6, 1).unwrap();
    assert_eq!(load(peer), 66);
    store(peer, 67);
    assert_eq!(load(peer), 67);
}

//! Every interleaving of small programs, explored by `loom`. Rows are `UnsafeCell`s, so a
//! missing happens-before edge is found as a data race.

// Every access to a row is what loom checks.
#![allow(clippy::undocumented_unsafe_blocks)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, AcqRel, Acquire)
    }
}

impl Tally for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }
    fn sub(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_sub(value, order)
    }
}

fn words<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

/// A region of one rank: two mailboxes by parity, the row they speak of, and the count of calls
/// that the owner has finished, which lives with the sender.
struct Lane {
    call: [AtomicU64; 2],
    payload: [[AtomicU64; 1]; 2],
    row: [UnsafeCell<u64>; 2],
    finished: AtomicU64,
}

impl Lane {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            call: words(),
            payload: [words(), words()],
            row: std::array::from_fn(|_| UnsafeCell::new(0)),
            finished: AtomicU64::new(0),
        })
    }

    fn mailbox(&self, call: u64) -> Mailbox<'_, AtomicU64> {
        let half = (call % 2) as usize;
        Mailbox {
            call: &self.call[half],
            payload: &self.payload[half],
        }
    }
}

#[test]
fn rows_and_payload_are_there_when_the_call_number_is() {
    loom::model(|| {
        let lane = Lane::new();
        let sender = {
            let lane = lane.clone();
            thread::spawn(move || {
                lane.row[1].with_mut(|row| unsafe { *row = 71 });
                lane.mailbox(1).post(1, &[17]);
            })
        };
        let mailbox = lane.mailbox(1);
        if mailbox.look(1) == Mail::Here {
            assert_eq!(mailbox.word(0), 17);
            // SAFETY (and what is checked): the sender's write happened before.
            assert_eq!(lane.row[1].with(|row| unsafe { *row }), 71);
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_mailbox_and_its_row_are_reused_only_when_read() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let lane = Lane::new();
        let sender = {
            let lane = lane.clone();
            thread::spawn(move || {
                for call in 1..=3u64 {
                    let finished = Counter(&lane.finished);
                    while finished.finished() + 2 < call {
                        thread::yield_now();
                    }
                    let half = (call % 2) as usize;
                    lane.row[half].with_mut(|row| unsafe { *row = 100 + call });
                    lane.mailbox(call).post(call, &[call]);
                }
            })
        };
        for call in 1..=3u64 {
            let mailbox = lane.mailbox(call);
            while mailbox.look(call) == Mail::NotYet {
                thread::yield_now();
            }
            assert_eq!(mailbox.look(call), Mail::Here);
            assert_eq!(mailbox.word(0), call);
            let half = (call % 2) as usize;
            assert_eq!(lane.row[half].with(|row| unsafe { *row }), 100 + call);
            Counter(&lane.finished).advance(call);
        }
        sender.join().unwrap();
    });
}

/// A futex: sleeps while the word is as expected.
struct Futex {
    lock: Mutex<()>,
    wake: Condvar,
}

#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let shared = Arc::new((
            AtomicU64::new(0),
            AtomicU32::new(0),
            AtomicU32::new(0),
            Futex {
                lock: Mutex::new(()),
                wake: Condvar::new(),
            },
        ));
        let poster = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (call, rings, sleepers, futex) = &*shared;
                Mailbox { call, payload: &[] }.post(1, &[]);
                Doorbell { rings, sleepers }.ring(|| {
                    drop(futex.lock.lock().unwrap());
                    futex.wake.notify_all();
                });
            })
        };
        let (call, rings, sleepers, futex) = &*shared;
        let mailbox = Mailbox { call, payload: &[] };
        // A lost wake-up leaves the waiter asleep for ever, which loom reports as a deadlock.
        while mailbox.look(1) == Mail::NotYet {
            Doorbell { rings, sleepers }.wait(
                || mailbox.look(1) == Mail::Here,
                |expected| {
                    let mut guard = futex.lock.lock().unwrap();
                    if rings.load(Relaxed) == expected {
                        guard = futex.wake.wait(guard).unwrap();
                    }
                    drop(guard);
                },
            );
        }
        poster.join().unwrap();
    });
}

#[test]
fn one_reason_is_kept_whole() {
    loom::model(|| {
        let shared = Arc::new((AtomicU64::new(0), words::<2>()));
        let raisers: Vec<_> = (0..2)
            .map(|rank| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (state, payload) = &*shared;
                    Abort { state, payload }.raise(rank, &[rank as u64 + 10, rank as u64 + 20]);
                })
            })
            .collect();
        let (state, payload) = &*shared;
        let abort = Abort { state, payload };
        let is_whole = |rank: usize| {
            assert_eq!(
                [abort.word(0), abort.word(1)],
                [rank as u64 + 10, rank as u64 + 20]
            );
        };
        let early = abort.raised();
        if let Some(rank) = early {
            is_whole(rank);
        }
        for raiser in raisers {
            raiser.join().unwrap();
        }
        let rank = abort.raised().expect("both have raised it");
        is_whole(rank);
        assert!(early.is_none_or(|early| early == rank), "the first is kept");
    });
}

//! Measurements that decide when streaming pays. They print and assert nothing; run them alone:
//!
//! ```text
//! CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo test -p deep-ep --lib copy::measure -- --ignored --nocapture --test-threads=1
//! ```

use std::{
    os::fd::AsFd,
    ptr,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap},
};

use super::*;
use crate::memory::region::{Backing, PeerRegion, Region};

const MIB: usize = 1 << 20;

/// An address that threads share; each writes its own part.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: only a number; the measurements give every thread a part of its own.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// What is timed, on each of `threads` threads: its number, and where phases end.
type Work<'a> = &'a (dyn Fn(usize, &Barrier) + Sync);

/// The median time of `work` on all threads, of at least 5 runs and about 0.3 seconds.
fn median(threads: usize, work: Work<'_>) -> Duration {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 6 || begin.elapsed() < Duration::from_millis(300) {
        let barrier = Barrier::new(threads);
        let run = |thread: usize| {
            barrier.wait();
            let start = Instant::now();
            work(thread, &barrier);
            barrier.wait();
            start.elapsed()
        };
        times.push(thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .map(|thread| scope.spawn(move || run(thread)))
                .collect();
            let own = run(0);
            others
                .into_iter()
                .map(|other| other.join().unwrap())
                .fold(own, Duration::max)
        }));
    }
    times.remove(0);
    times.sort_unstable();
    times[times.len() / 2]
}

fn gbps(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// Copies this thread's share of rows, in an order that jumps like a dispatch's.
fn copy_share(
    (dst, src): (Address, Address),
    (row, total): (usize, usize),
    (thread, threads): (usize, usize),
    store: Store,
) {
    let rows = total / row / threads;
    let first = thread * rows;
    let order = (first..first + rows).map(|i| (i * row, i * row));
    for (to, from) in order {
        // SAFETY: rows of this thread's own share, inside both ranges.
        unsafe { copy(dst.0.add(to), src.0.add(from), row, store) };
    }
    store_fence();
}

/// Reads this thread's share, as a receiver does.
fn read_share(dst: Address, total: usize, (thread, threads): (usize, usize)) -> u64 {
    let words = total / 8 / threads;
    // SAFETY: a committed share that nobody writes in this phase.
    let share =
        unsafe { std::slice::from_raw_parts(dst.0.cast::<u64>().add(thread * words), words) };
    std::hint::black_box(share.iter().fold(0, |sum, &word| sum ^ word))
}

fn committed(backing: Backing, bytes: usize) -> Region {
    let region = Region::new(backing, bytes as u64).unwrap();
    region.commit(bytes as u64).unwrap();
    region
}

fn base(region: &Region) -> Address {
    Address(region.base().as_ptr())
}

#[test]
#[ignore = "prints timings"]
fn cached_against_streaming() {
    let source = committed(Backing::Anonymous, 256 * MIB);
    let place = committed(Backing::Anonymous, 256 * MIB);
    let both = (base(&place), base(&source));
    println!("GB/s copied; 'and read' adds another thread reading what was copied");
    println!("row    total threads | cached streaming | and read: cached streaming");
    for row in [14336, 4096, 272] {
        for total in [1, 4, 16, 64, 256].map(|mib| mib * MIB) {
            for threads in [1, 2] {
                let copy = |store| {
                    let time = median(threads, &|thread, _| {
                        copy_share(both, (row, total), (thread, threads), store);
                    });
                    gbps(total, time)
                };
                let copy_and_read = |store| {
                    let time = median(2, &|thread, phase| {
                        if thread < threads {
                            copy_share(both, (row, total), (thread, threads), store);
                        }
                        phase.wait();
                        if threads == 2 || thread == 1 {
                            let part = if threads == 2 {
                                (1 - thread, 2)
                            } else {
                                (0, 1)
                            };
                            read_share(both.0, total, part);
                        }
                    });
                    gbps(total, time)
                };
                println!(
                    "{row:5} {:4} MiB {threads:3}    | {:6.1} {:6.1}    |  {:6.1} {:6.1}",
                    total / MIB,
                    copy(Store::Cached),
                    copy(Store::Streaming),
                    copy_and_read(Store::Cached),
                    copy_and_read(Store::Streaming),
                );
            }
        }
    }
}

/// A memfd with ordinary pages only, as most machines give it.
fn small_pages(bytes: usize) -> Address {
    let file = memfd_create("measure", MemfdFlags::CLOEXEC).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, bytes as u64).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::POPULATE;
    // SAFETY: a new mapping, which stays until the process ends.
    let at = unsafe { mmap(ptr::null_mut(), bytes, access, flags, file.as_fd(), 0) };
    Address(at.unwrap().cast())
}

#[test]
#[ignore = "prints timings"]
fn kinds_of_destination() {
    let total = 256 * MIB;
    let source = committed(Backing::Anonymous, total);
    let private = committed(Backing::Anonymous, total);
    let shared = committed(Backing::Memfd, total);
    let file = shared.file().unwrap().try_clone_to_owned().unwrap();
    let peer = PeerRegion::map(file, shared.reserve()).unwrap();
    let kinds = [
        ("private region", base(&private)),
        ("memfd region", base(&shared)),
        (
            "memfd region, peer's mapping",
            Address(peer.base().as_ptr()),
        ),
        ("memfd, 4 KiB pages", small_pages(total)),
    ];
    println!("256 MiB in rows of 14336, GB/s: cached 1, 2 threads | streaming 1, 2 threads");
    for (name, place) in kinds {
        let speed = |store, threads| {
            let time = median(threads, &|thread, _| {
                copy_share(
                    (place, base(&source)),
                    (14336, total),
                    (thread, threads),
                    store,
                );
            });
            gbps(total, time)
        };
        println!(
            "{name:30} {:6.1} {:6.1} | {:6.1} {:6.1}",
            speed(Store::Cached, 1),
            speed(Store::Cached, 2),
            speed(Store::Streaming, 1),
            speed(Store::Streaming, 2)
        );
    }
}

#[test]
#[ignore = "prints timings"]
fn first_touch() {
    let total = 256 * MIB;
    let timed = |name: &str, work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        let time = start.elapsed();
        println!(
            "{name:44} {:7.1} ms = {:5.2} GB/s",
            time.as_secs_f64() * 1e3,
            gbps(total, time)
        );
    };
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let region = Region::new(backing, total as u64).unwrap();
        timed(&format!("commit of a {backing:?} region"), &mut || {
            region.commit(total as u64).unwrap();
        });
        timed("  then the first write", &mut || {
            touch(base(&region), total)
        });
        timed("  then the second write", &mut || {
            touch(base(&region), total)
        });
        if let Some(file) = region.file() {
            let file = file.try_clone_to_owned().unwrap();
            let peer = PeerRegion::map(file, region.reserve()).unwrap();
            let at = Address(peer.base().as_ptr());
            timed("  a peer's first write", &mut || touch(at, total));
        }
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping that only this test knows.
    let plain =
        unsafe { mmap_anonymous(ptr::null_mut(), total, access, MapFlags::PRIVATE) }.unwrap();
    timed("first write to plain 4 KiB pages", &mut || {
        touch(Address(plain.cast()), total)
    });
    // SAFETY: the mapping above; nobody uses it any more.
    unsafe { munmap(plain, total) }.unwrap();
}

fn touch(at: Address, total: usize) {
    // SAFETY: `total` bytes that only this thread uses.
    unsafe { at.0.write_bytes(1, total) };
}

//! One rank's region: addresses reserved once, memory committed behind.
//!
//! ```text
//!   base                         base + committed                    base + reserve
//!    |  memory, read and written  |  addresses only                   |
//!    |  by every rank             |  (private: no access; memfd: past the file's end)
//! ```
//!
//! [`Region::commit`] only moves `committed` to the right, so an address that was good stays good,
//! whatever grows. A lack of memory is [`Error::OutOfMemory`] at the commit and not a signal at
//! the first store: before each step the machine's and the control groups' free memory is looked
//! up, and the step is backed before it counts. (Between processes a peer that stores past what
//! the owner has committed but inside the file would make the kernel look for memory then; see
//! [`PeerRegion::checked`].)

mod mapping;
mod peer;
#[cfg(test)]
mod tests;

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
    },
    io::Errno,
};

use self::mapping::{HUGE_PAGE, Mapping};
pub(crate) use self::peer::{PeerRegion, Window};
use super::system::MemoryFacts;
use crate::error::{Error, Result};

/// Memory is committed in multiples of this many bytes.
pub(crate) const COMMIT_STEP: u64 = HUGE_PAGE;

/// The largest region, in bytes: half of the smallest user address space (47 bits).
pub(crate) const MAX_RESERVE: u64 = 1 << 46;

/// Free memory is looked up again after committing this many bytes.
const CHECK_EVERY: u64 = 256 << 20;

/// Bytes that a commit leaves to everybody else at least, or 1/64 of the machine if that is less.
const MARGIN: u64 = 256 << 20;

/// What the memory of errors was for.
const PURPOSE: &str = "symmetric memory";

/// Where the memory of a region comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Backing {
    /// Private memory: all ranks are threads of this process.
    Anonymous,
    /// A memfd that can be passed to other processes.
    Memfd,
}

/// One rank's own region.
#[derive(Debug)]
pub(crate) struct Region {
    mapping: Mapping,
    /// `None`: private memory.
    file: Option<OwnedFd>,
    /// Bytes from the base on that may be accessed; only grows.
    committed: AtomicU64,
    /// Held while growing. The length of the file, which may lie past `committed` after a commit
    /// that failed: the seal forbids to shorten it.
    growing: Mutex<u64>,
}

impl Region {
    /// Reserves the addresses of a region; no memory yet.
    ///
    /// `reserve` is in bytes, rounded up to [`COMMIT_STEP`]; 0 or more than [`MAX_RESERVE`] is an
    /// error. Where the system refuses it (an address space limit), halves of it are tried, and
    /// [`reserve`](Self::reserve) says what was had.
    pub(crate) fn new(backing: Backing, reserve: u64) -> Result<Self> {
        let mut len = checked_reserve(reserve)?;
        let mapping = loop {
            match Mapping::reserve(len) {
                Ok(mapping) => break mapping,
                Err(Errno::NOMEM) if len > COMMIT_STEP => {
                    len = (len / 2).next_multiple_of(COMMIT_STEP);
                }
                Err(Errno::NOMEM) => return Err(out_of_memory(len, 0)),
                Err(error) => return Err(Error::io("reserving addresses", error)),
            }
        };
        let file = match backing {
            Backing::Anonymous => None,
            Backing::Memfd => {
                let file = create_memfd()?;
                mapping
                    .show(file.as_fd())
                    .map_err(|error| Error::io("mapping a memfd", error))?;
                Some(file)
            }
        };
        Ok(Self {
            mapping,
            file,
            committed: AtomicU64::new(0),
            growing: Mutex::new(0),
        })
    }

    /// The size to reserve by default when this process maps `regions` regions: the memory it
    /// could ever have, or its share of the address space if that is less.
    pub(crate) fn default_reserve(regions: usize) -> Result<u64> {
        let facts = MemoryFacts::read()?;
        let addresses = facts
            .address_space
            .map_or(MAX_RESERVE, |limit| (limit / 2).min(MAX_RESERVE));
        let share = addresses / (regions as u64).max(1);
        let wanted = facts.limit().min(share).max(COMMIT_STEP);
        Ok(wanted - wanted % COMMIT_STEP)
    }

    /// Commits memory until at least `len` bytes from the base on are there, and says how many are.
    ///
    /// New memory reads as zero. A larger commit that came before makes this a no-op. Commits of
    /// several threads run one after the other.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] if `len` exceeds the reserve or more than can be had; the region is
    /// then as it was.
    pub(crate) fn commit(&self, len: u64) -> Result<u64> {
        let mut file_len = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.committed();
        if len <= old {
            return Ok(old);
        }
        if len > self.reserve() {
            return Err(out_of_memory(len, self.reserve()));
        }
        // The reserve is a multiple of the step, so this stays inside.
        let target = len.next_multiple_of(COMMIT_STEP);
        if let Err(error) = self.back(old, target, &mut file_len) {
            self.give_back(old, target);
            return Err(error);
        }
        self.committed.store(target, Ordering::Release);
        Ok(target)
    }

    /// Puts memory behind `start..end`.
    fn back(&self, start: u64, end: u64, file_len: &mut u64) -> Result<()> {
        let mut at = start;
        while at < end {
            ensure_obtainable(at, end)?;
            let next = end.min(at + CHECK_EVERY);
            let backed = match &self.file {
                None => self.back_private(at, next),
                Some(file) => self.back_file(file, at, next, file_len),
            };
            backed.map_err(|error| commit_error(error, next, at))?;
            at = next;
        }
        Ok(())
    }

    fn back_private(&self, start: u64, end: u64) -> Result<(), Errno> {
        self.mapping.allow(start, end)?;
        self.mapping.populate(start, end).map(drop)
    }

    /// A page fault can take a huge page where the system allows that for shared memory, and
    /// `fallocate` cannot: so the range is populated first. `fallocate` then is the guarantee that
    /// every page is there.
    fn back_file(&self, file: &OwnedFd, start: u64, end: u64, len: &mut u64) -> Result<(), Errno> {
        if *len < end {
            ftruncate(file, end)?;
            *len = end;
        }
        self.mapping.populate(start, end)?;
        loop {
            match fallocate(file, FallocateFlags::empty(), start, end - start) {
                Err(Errno::INTR) => {}
                done => return done,
            }
        }
    }

    /// Returns the memory of a commit that failed.
    fn give_back(&self, start: u64, end: u64) {
        match &self.file {
            None => self.mapping.forbid(start, end),
            Some(file) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // Without the hole the memory stays taken until the region is dropped.
                let _ = fallocate(file, hole, start, end - start);
            }
        }
    }

    /// The first byte; never changes.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Bytes of address space.
    pub(crate) fn reserve(&self) -> u64 {
        self.mapping.len()
    }

    /// Bytes that may be accessed.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    /// The memfd to pass to other processes, if there is one.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// The address of `offset`, when `len` bytes from there on are committed.
    pub(crate) fn ptr(&self, offset: u64, len: u64) -> Result<*mut u8> {
        inside(self.base(), offset, len, self.committed())
    }
}

/// `reserve` in steps, if a region can have that size.
fn checked_reserve(reserve: u64) -> Result<u64> {
    if reserve == 0 || reserve > MAX_RESERVE {
        return Err(Error::invalid(
            "reserve",
            reserve,
            "must be 1 to 2^46 bytes",
        ));
    }
    Ok(reserve.next_multiple_of(COMMIT_STEP))
}

/// The address of `offset .. offset + len`, if that lies inside `limit` bytes.
fn inside(base: NonNull<u8>, offset: u64, len: u64, limit: u64) -> Result<*mut u8> {
    match offset.checked_add(len) {
        // A mapping's length fits the address space, so this offset does.
        Some(end) if end <= limit => Ok(base.as_ptr().wrapping_add(offset as usize)),
        _ => Err(Error::invalid(
            "range of symmetric memory",
            format!("{len} bytes at {offset}"),
            format!("must end within {limit} bytes"),
        )),
    }
}

/// A memfd that nobody can shorten (a shortened file turns loads into SIGBUS), seal further, or
/// make executable.
fn create_memfd() -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match memfd_create("deep-ep", flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => memfd_create("deep-ep", flags),
        other => other,
    }
    .map_err(|error| Error::io("creating a memfd", error))?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)
        .map_err(|error| Error::io("sealing a memfd", error))?;
    Ok(file)
}

/// Fails when the machine or a control group has no room for `end - start` more bytes.
fn ensure_obtainable(start: u64, end: u64) -> Result<()> {
    let facts = MemoryFacts::read()?;
    let margin = MARGIN.min(facts.total / 64);
    let obtainable = facts.obtainable().saturating_sub(margin);
    if end - start > obtainable {
        return Err(out_of_memory(end, start.saturating_add(obtainable)));
    }
    Ok(())
}

fn commit_error(error: Errno, requested: u64, had: u64) -> Error {
    match error {
        // EFAULT is how populating says that a fault ended in SIGBUS.
        Errno::NOMEM | Errno::NOSPC | Errno::FAULT => out_of_memory(requested, had),
        error => Error::io("committing symmetric memory", error),
    }
}

fn out_of_memory(requested: u64, limit: u64) -> Error {
    Error::OutOfMemory {
        purpose: PURPOSE.into(),
        requested,
        limit,
    }
}

//! Another rank's region as this rank sees it.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::fs::{FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat};

use super::{COMMIT_STEP, MAX_RESERVE, Mapping, Region, inside};
use crate::error::{Error, Result};

/// A mapping of the region of another process, at an address of this process's own.
///
/// Nothing that the peer says is trusted: what is mapped is checked to be memory that cannot
/// shrink, and offsets are checked against the file itself.
#[derive(Debug)]
pub(crate) struct PeerRegion {
    mapping: Mapping,
    file: OwnedFd,
    /// The file's length when it was last asked for. The file never shrinks.
    known: AtomicU64,
}

impl PeerRegion {
    /// Maps `file`, of which the peer says that it reserved `reserve` bytes for it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `reserve` is no possible size of a region or `file` is not a
    /// readable and writable memfd that is sealed against shrinking; [`Error::OutOfMemory`] when
    /// this process has no address space for it.
    pub(crate) fn map(file: OwnedFd, reserve: u64) -> Result<Self> {
        if reserve == 0 || reserve > MAX_RESERVE || !reserve.is_multiple_of(COMMIT_STEP) {
            let limit = "must be a multiple of 2 MiB up to 2^46 bytes";
            return Err(Error::invalid("a peer's reserve", reserve, limit));
        }
        let len = checked_memfd(&file)?;
        let mapping = Mapping::reserve(reserve).map_err(|error| match error {
            rustix::io::Errno::NOMEM => super::out_of_memory(reserve, 0),
            error => Error::io("reserving addresses for a peer's region", error),
        })?;
        mapping
            .show(file.as_fd())
            .map_err(|error| Error::io("mapping a peer's region", error))?;
        Ok(Self {
            mapping,
            file,
            known: AtomicU64::new(len),
        })
    }

    /// The first byte; never changes.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Bytes of address space.
    pub(crate) fn reserve(&self) -> u64 {
        self.mapping.len()
    }

    /// The address of `offset`, when the peer has committed `len` bytes from there on: for offsets
    /// that came from a peer. Asks the kernel only when the range ends behind all earlier ones.
    pub(crate) fn checked(&self, offset: u64, len: u64) -> Result<*mut u8> {
        let limit = self.known.load(Ordering::Relaxed).min(self.reserve());
        if offset.checked_add(len).is_some_and(|end| end <= limit) {
            return inside(self.base(), offset, len, limit);
        }
        let len_now = file_len(&self.file)?;
        let known = self
            .known
            .fetch_max(len_now, Ordering::Relaxed)
            .max(len_now);
        inside(self.base(), offset, len, known.min(self.reserve()))
    }
}

/// The length of `file`, if it is memory that nobody can shorten.
fn checked_memfd(file: &OwnedFd) -> Result<u64> {
    let refuse = |is: String, limit: &'static str| Error::invalid("a peer's file", is, limit);
    let stat = fstat(file).map_err(|error| Error::io("looking at a peer's file", error))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::RegularFile {
        return Err(refuse(format!("{kind:?}"), "must be a memfd"));
    }
    // Only memory files have seals at all.
    let seals = fcntl_get_seals(file)
        .map_err(|error| refuse(format!("without seals ({error})"), "must be a memfd"))?;
    if !seals.contains(SealFlags::SHRINK) || seals.contains(SealFlags::WRITE) {
        return Err(refuse(
            format!("sealed {seals:?}"),
            "must be sealed against shrinking and not against writing",
        ));
    }
    let access = fcntl_getfl(file).map_err(|error| Error::io("looking at a peer's file", error))?;
    if access & OFlags::RWMODE != OFlags::RDWR {
        return Err(refuse(
            format!("open as {access:?}"),
            "must be open for reading and writing",
        ));
    }
    file_len(file)
}

fn file_len(file: &OwnedFd) -> Result<u64> {
    let stat = fstat(file).map_err(|error| Error::io("looking at a peer's file", error))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// A rank's region, wherever the rank lives.
#[derive(Debug, Clone)]
pub(crate) enum Window {
    /// This rank, or a rank that is a thread of this process.
    Local(Arc<Region>),
    /// A rank in another process.
    Mapped(Arc<PeerRegion>),
}

impl Window {
    /// The first byte; never changes.
    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Self::Local(region) => region.base(),
            Self::Mapped(region) => region.base(),
        }
    }

    /// The address of `offset`, when its owner has committed `len` bytes from there on.
    pub(crate) fn checked(&self, offset: u64, len: u64) -> Result<*mut u8> {
        match self {
            Self::Local(region) => region.ptr(offset, len),
            Self::Mapped(region) => region.checked(offset, len),
        }
    }
}

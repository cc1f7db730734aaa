//! A range of addresses that this process owns: reserved, backed, given back at drop.

use std::{ffi::c_void, os::fd::BorrowedFd, ptr, ptr::NonNull};

use rustix::{
    io::{Errno, Result},
    mm::{
        Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
    },
};

/// The size of a huge page (x86-64, and arm64 with 4 KiB pages). Regions start at a multiple of it
/// and grow by multiples of it, so that the kernel can back them with huge pages.
pub(super) const HUGE_PAGE: u64 = 2 << 20;

/// Addresses `base .. base + len`, both multiples of [`HUGE_PAGE`].
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; all that this type does itself are
// system calls on its own range.
unsafe impl Send for Mapping {}
// SAFETY: as above; access to the bytes goes through raw pointers, whose users synchronise.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Takes `len` bytes of address space, a multiple of [`HUGE_PAGE`], that nothing can access
    /// yet. Costs no memory.
    pub(super) fn reserve(len: u64) -> Result<Self> {
        debug_assert!(len > 0 && len.is_multiple_of(HUGE_PAGE));
        let huge = HUGE_PAGE as usize;
        let len = usize::try_from(len).map_err(|_| Errno::NOMEM)?;
        let whole = len.checked_add(huge).ok_or(Errno::NOMEM)?;
        // Without access the range counts neither for overcommitment nor for core dumps.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), flags) }?;
        let head = start.addr().next_multiple_of(huge) - start.addr();
        let tail = whole - head - len;
        let base = start.cast::<u8>().wrapping_add(head);
        if head > 0 {
            // SAFETY: the first `head` bytes of the new mapping; nobody has an address in it.
            let _ = unsafe { munmap(start, head) };
        }
        if tail > 0 {
            // SAFETY: the last `tail` bytes of the new mapping; nobody has an address in it.
            let _ = unsafe { munmap(base.wrapping_add(len).cast(), tail) };
        }
        let base = NonNull::new(base).ok_or(Errno::NOMEM)?;
        let this = Self { base, len };
        // Core dumps would otherwise hold every row in flight.
        this.advise(0, this.len(), Advice::LinuxDontDump);
        this.advise(0, this.len(), Advice::LinuxHugepage);
        Ok(this)
    }

    /// Shows the file `fd` at these addresses, from its first byte on. The range may reach past the
    /// file's end: those addresses come alive when the file grows.
    pub(super) fn show(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces this mapping's own range, of which no address was given out yet.
        unsafe { mmap(self.at(0), self.len, READ_WRITE, flags, fd, 0) }?;
        self.advise(0, self.len(), Advice::LinuxDontDump);
        self.advise(0, self.len(), Advice::LinuxHugepage);
        Ok(())
    }

    /// Makes the range accessible. The range lies inside the mapping.
    pub(super) fn allow(&self, start: u64, end: u64) -> Result<()> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: widens the access to a part of this mapping.
        unsafe { mprotect(self.at(start), (end - start) as usize, access) }
    }

    /// Gives the memory of the range back and makes it inaccessible (for private memory).
    pub(super) fn forbid(&self, start: u64, end: u64) {
        self.advise(start, end, Advice::LinuxDontNeed);
        // SAFETY: the caller gives out addresses only below what it has committed, and the range
        // lies behind that. If the call fails the range stays accessible, which does no harm.
        let _ = unsafe {
            mprotect(
                self.at(start),
                (end - start) as usize,
                MprotectFlags::empty(),
            )
        };
    }

    /// Fills the range with memory now, so that no later access has to. `Ok(false)`: this kernel
    /// cannot (before 5.14).
    pub(super) fn populate(&self, start: u64, end: u64) -> Result<bool> {
        loop {
            // SAFETY: populating writes nothing; the range is a part of this mapping.
            let done = unsafe {
                madvise(
                    self.at(start),
                    (end - start) as usize,
                    Advice::LinuxPopulateWrite,
                )
            };
            match done {
                Ok(()) => return Ok(true),
                Err(Errno::INVAL) => return Ok(false),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives advice that may be ignored.
    fn advise(&self, start: u64, end: u64, advice: Advice) {
        // SAFETY: a part of this mapping; the advice given here never changes bytes that anybody
        // has an address of.
        let _ = unsafe { madvise(self.at(start), (end - start) as usize, advice) };
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    fn at(&self, offset: u64) -> *mut c_void {
        debug_assert!(offset <= self.len());
        self.base.as_ptr().wrapping_add(offset as usize).cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own, and whoever holds addresses in it keeps the
        // mapping alive.
        let _ = unsafe { munmap(self.at(0), self.len) };
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

//! The types of the library's interface on the functions of C's.

mod buffer;
mod communicator;
mod error;
mod handle;
mod high_throughput;
mod layout;
mod low_latency;
mod memory;

pub(crate) use buffer::Buffer;
pub(crate) use communicator::Communicator;
pub(crate) use handle::{DispatchHandle, LowLatencyHandle};
pub(crate) use high_throughput::{
    CombineInput, CombineRows, DispatchInput, Dispatched, PendingDispatch, Routes,
};
pub(crate) use layout::Layout;
pub(crate) use low_latency::{LowLatencyCombineInput, LowLatencyDispatched};
pub(crate) use memory::{Loan, OwnedTensor};

/// A struct of C as the function of its name makes it.
macro_rules! made {
    ($type:ty) => {{
        // SAFETY: all fields may be zeros.
        let mut made: $type = unsafe { std::mem::zeroed() };
        made.struct_size = size_of::<$type>();
        made
    }};
}
use made;

/// Calls a function of C; an error if it does not return 0. `rank` is who calls.
macro_rules! c {
    ($rank:expr, $call:expr) => {{
        // SAFETY: all pointers are to values that live while the call lasts, and memory that the call
        // uses after it is borrowed by what is made of it.
        let status = unsafe { $call };
        $crate::through_c::error::check(status, $rank)
    }};
}
use c;

/// An object of C, freed when dropped.
struct Owned<T> {
    pointer: *mut T,
    free: unsafe extern "C" fn(*mut T) -> i32,
}

// SAFETY: C's objects may be used and freed by any thread.
unsafe impl<T> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Owned<T> {}

impl<T> Owned<T> {
    fn new(pointer: *mut T, free: unsafe extern "C" fn(*mut T) -> i32) -> Self {
        Self { pointer, free }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        let free = self.free;
        c!(0, free(self.pointer)).expect("it was not freed before");
    }
}

//! Parameters of the kernels in `limit.cu`; `limit_params.cuh` declares the same, and a test
//! compares the two.

use bytemuck::{NoUninit, Pod, Zeroable};

/// `store_copy` and `bulk_copy`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct CopyParams {
    /// Address of the memory that is written.
    pub(crate) target: u64,
    /// Address of the memory that is read.
    pub(crate) source: u64,
    /// A multiple of 16, and for `bulk_copy` of the chunk.
    pub(crate) bytes: u64,
}

/// What `round_trip` says in pinned memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RoundTrip {
    /// GPU time of all trips.
    pub(crate) nanoseconds: u64,
    /// Round trips that were made.
    pub(crate) trips: u32,
    /// [`RoundTrip::COMPLETE`], or [`RoundTrip::TIMED_OUT`].
    pub(crate) state: u32,
}

impl RoundTrip {
    /// All trips were made.
    pub(crate) const COMPLETE: u32 = 1;
    /// The deadline passed.
    pub(crate) const TIMED_OUT: u32 = 2;
}

/// `round_trip`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct RoundTripParams {
    /// Address of the flag where the other side stores; holds 0 at first.
    pub(crate) mine: u64,
    /// Address of the flag where this side stores; holds 0 at first.
    pub(crate) theirs: u64,
    /// Address of a [`RoundTrip`] in pinned memory.
    pub(crate) result: u64,
    /// Nanoseconds after which a side gives up.
    pub(crate) timeout: u64,
    /// Round trips to make.
    pub(crate) trips: u32,
    /// 1 if block 0 is the side that begins.
    pub(crate) begins: u32,
}

/// CUDA source that compiles only if the structs are laid out as here. NVRTC has no `offsetof`;
/// `__INTADDR__` is what its front end makes of it elsewhere.
#[cfg(test)]
pub(crate) fn assertions() -> String {
    macro_rules! layout {
        ($($type:ident { $($field:ident),* })*) => {
            [$(
                format!(
                    "static_assert(sizeof({}) == {});\n",
                    stringify!($type),
                    size_of::<$type>()
                ),
                $(format!(
                    "static_assert(__INTADDR__(&(({}*)0)->{}) == {});\n",
                    stringify!($type),
                    stringify!($field),
                    std::mem::offset_of!($type, $field)
                ),)*
            )*]
        };
    }
    layout! {
        CopyParams { target, source, bytes }
        RoundTrip { nanoseconds, trips, state }
        RoundTripParams { mine, theirs, result, timeout, trips, begins }
    }
    .concat()
}

//! Programs and the constants they are compiled for.

use crate::engine::cuda::driver::nvrtc::Program;

/// Texts that programs may include.
const HEADERS: [(&str, &str); 9] = [
    ("ptx.cuh", include_str!("../kernels/ptx.cuh")),
    ("group.cuh", include_str!("../kernels/group.cuh")),
    ("announce.cuh", include_str!("../kernels/announce.cuh")),
    ("bulk.cuh", include_str!("../kernels/bulk.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("sum.cuh", include_str!("../kernels/sum.cuh")),
    (
        "dispatch_params.cuh",
        include_str!("../kernels/dispatch_params.cuh"),
    ),
    (
        "combine_params.cuh",
        include_str!("../kernels/combine_params.cuh"),
    ),
    (
        "limit_params.cuh",
        include_str!("../kernels/limit_params.cuh"),
    ),
];

/// One program with its constants: what is compiled, cached and loaded as a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    /// The kernels of `bench --limit`.
    Limit(LimitKey),
    /// High-throughput dispatch.
    Dispatch(DispatchKey),
    /// High-throughput combine.
    Combine(CombineKey),
}

/// Constants of `dispatch.cu`; 0: known only at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct DispatchKey {
    /// Ranks of the group.
    pub(crate) ranks: u32,
    /// Choices of a token.
    pub(crate) top_k: u32,
    /// Bytes of a row.
    pub(crate) row_bytes: u32,
}

/// Constants of `combine.cu`; 0 of all but the element type: known only at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct CombineKey {
    /// Element type: 0 bf16, 1 f16, 2 f32.
    pub(crate) dtype: u32,
    /// Ranks of the group.
    pub(crate) ranks: u32,
    /// Bytes of a row.
    pub(crate) row_bytes: u32,
}

/// Constants of `limit.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LimitKey {
    /// Bytes of a bulk copy, a multiple of 128.
    pub(crate) chunk_bytes: u32,
    /// Warps of a block that copies in bulk.
    pub(crate) warps: u32,
    /// Chunks in shared memory, per warp.
    pub(crate) buffers: u32,
    /// Stores per warp that may still be reading their buffer when the next load is issued.
    pub(crate) lag: u32,
    /// 16-byte words in flight per thread of a plain copy.
    pub(crate) unroll: u32,
}

impl LimitKey {
    /// Bytes of dynamic shared memory of a block that copies in bulk: chunks and barriers.
    pub(crate) fn shared_bytes(&self) -> u32 {
        self.warps * self.buffers * (self.chunk_bytes + 8)
    }
}

/// Whether the compiler may fuse a product and a sum, which rounds once instead of twice.
///
/// Programs that compute with rows say `fma` where the semantics want it, so the compiler never
/// adds any: results would depend on its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contraction {
    /// Only where the source says so.
    Explicit,
}

impl Key {
    pub(crate) fn program(&self) -> Program<'static> {
        match self {
            Self::Limit(_) => Program {
                name: "limit.cu",
                source: include_str!("../kernels/limit.cu"),
                headers: &HEADERS,
            },
            Self::Dispatch(_) => Program {
                name: "dispatch.cu",
                source: include_str!("../kernels/dispatch.cu"),
                headers: &HEADERS,
            },
            Self::Combine(_) => Program {
                name: "combine.cu",
                source: include_str!("../kernels/combine.cu"),
                headers: &HEADERS,
            },
        }
    }

    /// Macros that the program is compiled with.
    pub(crate) fn constants(&self) -> Vec<(&'static str, u64)> {
        match *self {
            Self::Limit(key) => vec![
                ("CHUNK_BYTES", key.chunk_bytes.into()),
                ("WARPS", key.warps.into()),
                ("BUFFERS", key.buffers.into()),
                ("LAG", key.lag.into()),
                ("UNROLL", key.unroll.into()),
            ],
            Self::Dispatch(key) => vec![
                ("RANKS", key.ranks.into()),
                ("TOP_K", key.top_k.into()),
                ("ROW_BYTES", key.row_bytes.into()),
            ],
            Self::Combine(key) => vec![
                ("DTYPE", key.dtype.into()),
                ("RANKS", key.ranks.into()),
                ("ROW_BYTES", key.row_bytes.into()),
            ],
        }
    }

    pub(crate) fn contraction(&self) -> Contraction {
        match self {
            Self::Limit(_) | Self::Dispatch(_) | Self::Combine(_) => Contraction::Explicit,
        }
    }
}

//! Programs and the constants they are compiled for.

use crate::engine::cuda::driver::nvrtc::Program;

/// Texts that programs may include.
const HEADERS: [(&str, &str); 17] = [
    ("ptx.cuh", include_str!("../kernels/ptx.cuh")),
    ("group.cuh", include_str!("../kernels/group.cuh")),
    ("announce.cuh", include_str!("../kernels/announce.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("units.cuh", include_str!("../kernels/units.cuh")),
    ("sum.cuh", include_str!("../kernels/sum.cuh")),
    ("fp8.cuh", include_str!("../kernels/fp8.cuh")),
    ("logfmt.cuh", include_str!("../kernels/logfmt.cuh")),
    (
        "low_latency.cuh",
        include_str!("../kernels/low_latency.cuh"),
    ),
    (
        "low_latency_params.cuh",
        include_str!("../kernels/low_latency_params.cuh"),
    ),
    (
        "dispatch_shared.cuh",
        include_str!("../kernels/dispatch_shared.cuh"),
    ),
    (
        "dispatch_count.cuh",
        include_str!("../kernels/dispatch_count.cuh"),
    ),
    (
        "dispatch_send.cuh",
        include_str!("../kernels/dispatch_send.cuh"),
    ),
    (
        "dispatch_receive.cuh",
        include_str!("../kernels/dispatch_receive.cuh"),
    ),
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
    /// Low-latency dispatch.
    LowLatencyDispatch(LowLatencyKey),
    /// Low-latency combine.
    LowLatencyCombine(LowLatencyKey),
    /// The barrier of low-latency calls.
    LowLatencyBarrier,
}

/// Constants of `low_latency_dispatch.cu` and `low_latency_combine.cu`; 0: known only at run time.
/// Where the hidden size is known, the caller's rows are aligned to 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct LowLatencyKey {
    /// Ranks of the group.
    pub(crate) ranks: u32,
    /// Choices of a token.
    pub(crate) top_k: u32,
    /// Elements of a row.
    pub(crate) hidden: u32,
    /// How rows travel, from 1: bf16, FP8 with f32, power-of-two or UE8M0 scales; sums as bf16, as
    /// LogFMT, or exact.
    pub(crate) format: u32,
}

impl LowLatencyKey {
    /// Macros; the last one is called `format`.
    fn constants(self, format: &'static str) -> Vec<(&'static str, u64)> {
        vec![
            ("RANKS", self.ranks.into()),
            ("TOP_K", self.top_k.into()),
            ("HIDDEN", self.hidden.into()),
            (format, self.format.into()),
        ]
    }
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
            Self::LowLatencyDispatch(_) => Program {
                name: "low_latency_dispatch.cu",
                source: include_str!("../kernels/low_latency_dispatch.cu"),
                headers: &HEADERS,
            },
            Self::LowLatencyCombine(_) => Program {
                name: "low_latency_combine.cu",
                source: include_str!("../kernels/low_latency_combine.cu"),
                headers: &HEADERS,
            },
            Self::LowLatencyBarrier => Program {
                name: "low_latency_barrier.cu",
                source: include_str!("../kernels/low_latency_barrier.cu"),
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
            Self::LowLatencyDispatch(key) => key.constants("FORMAT"),
            Self::LowLatencyCombine(key) => key.constants("WIRE"),
            Self::LowLatencyBarrier => vec![],
        }
    }

    pub(crate) fn contraction(&self) -> Contraction {
        match self {
            Self::Limit(_)
            | Self::Dispatch(_)
            | Self::Combine(_)
            | Self::LowLatencyDispatch(_)
            | Self::LowLatencyCombine(_)
            | Self::LowLatencyBarrier => Contraction::Explicit,
        }
    }
}

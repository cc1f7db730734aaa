//! Which program a call uses: the one place that knows, for the engine, which launches it, and for
//! [`warmup`](fn@crate::cuda::warmup), which compiles it before.
//!
//! Shapes that models have get a program of their own, whose loops have known lengths; all others
//! share one for each call.

pub(crate) use super::control::MAX_RANKS;
use super::dispatch::MAX_TOP_K;
use crate::{
    buffer::{CombineWire, RowFormat},
    codec::ScaleFormat,
    dtype::DType,
    engine::cuda::{
        driver::device::ComputeCapability,
        jit::{CombineKey, DispatchKey, Key, LowLatencyKey},
    },
};

/// The first GPUs that cast to FP8, as a low-latency dispatch does.
pub(super) const FP8_SINCE: ComputeCapability = ComputeCapability { major: 8, minor: 9 };

/// Low-latency rows from so many elements on have a program of their own for each shape.
const SPECIALISED_HIDDEN: u32 = 1024;

/// Dispatches of every shape, rejects and layouts.
pub(super) const ANY_DISPATCH: Key = Key::Dispatch(DispatchKey {
    ranks: 0,
    top_k: 0,
    row_bytes: 0,
});

/// Combines of every shape of bf16, and rejects.
pub(super) const ANY_COMBINE: Key = Key::Combine(CombineKey {
    dtype: 0,
    ranks: 0,
    row_bytes: 0,
});

/// Whether rows of the high-throughput calls fill a warp's loop, as those of models do.
fn fills_warps(row_bytes: u32) -> bool {
    row_bytes >= 2048 && row_bytes.is_multiple_of(512)
}

/// A high-throughput dispatch of rows of `row_bytes`. `top_k` is 0 where no choices travel with
/// them: along a handle, or by a layout alone.
pub(super) fn dispatch(ranks: u32, top_k: u32, row_bytes: u32) -> Key {
    Key::Dispatch(match fills_warps(row_bytes) {
        false => DispatchKey::default(),
        true => DispatchKey {
            ranks,
            top_k,
            row_bytes,
        },
    })
}

/// Element types as combine.cu counts them. What else a combine is asked for is refused before.
pub(super) fn combine_dtype(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => 1,
        DType::F32 => 2,
        _ => 0,
    }
}

/// A high-throughput combine. Only rows of bf16 have programs of their own.
pub(super) fn combine(dtype: u8, ranks: u32, row_bytes: u32) -> Key {
    let known = dtype == 0 && fills_warps(row_bytes);
    Key::Combine(CombineKey {
        dtype: dtype.into(),
        ranks: if known { ranks } else { 0 },
        row_bytes: if known { row_bytes } else { 0 },
    })
}

/// Constants of a low-latency call, if the caller's rows are `aligned` to 16 bytes.
pub(super) fn low_latency(shape: LowLatencyKey, aligned: bool) -> LowLatencyKey {
    match aligned && shape.hidden >= SPECIALISED_HIDDEN {
        true => shape,
        false => LowLatencyKey::default(),
    }
}

/// `RowFormat` of low_latency_params.cuh.
pub(super) fn row_format(format: RowFormat) -> u32 {
    match format {
        RowFormat::Bf16 => 1,
        RowFormat::Fp8(ScaleFormat::F32) => 2,
        RowFormat::Fp8(ScaleFormat::PowerOfTwo) => 3,
        RowFormat::Fp8(ScaleFormat::Ue8m0) => 4,
    }
}

/// Scales of FP8 rows.
const SCALES: [ScaleFormat; 3] = [
    ScaleFormat::F32,
    ScaleFormat::PowerOfTwo,
    ScaleFormat::Ue8m0,
];

/// `CombineWire` of low_latency_params.cuh.
pub(super) fn combine_wire(wire: CombineWire) -> u32 {
    match wire {
        CombineWire::Bf16 => 1,
        CombineWire::LogFmt => 2,
        CombineWire::Exact => 3,
    }
}

/// All ways in which low-latency sums travel.
const WIRES: [CombineWire; 3] = [CombineWire::Bf16, CombineWire::LogFmt, CombineWire::Exact];

/// Sizes of calls whose rows are aligned to 16 bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallSizes {
    pub(crate) ranks: u32,
    pub(crate) top_k: u32,
    /// Elements of a row, below 2^31.
    pub(crate) hidden: u32,
    /// Dispatched rows are FP8, else bf16. Combined ones are bf16.
    pub(crate) fp8: bool,
}

/// The programs of all calls of these sizes on a GPU of this capability, those for every shape
/// among them: layouts, rejects and calls whose rows are not aligned use them. Some come twice.
pub(crate) fn of_calls(sizes: CallSizes, gpu: ComputeCapability) -> Vec<Key> {
    let CallSizes {
        ranks,
        top_k,
        hidden,
        fp8,
    } = sizes;
    let bf16_bytes = 2 * hidden;
    let row_bytes = if fp8 { hidden } else { bf16_bytes };
    let bf16 = combine_dtype(DType::Bf16);
    let mut keys = vec![
        ANY_DISPATCH,
        ANY_COMBINE,
        // Rows without choices: along a handle.
        dispatch(ranks, 0, row_bytes),
        combine(bf16, ranks, bf16_bytes),
        Key::LowLatencyBarrier,
    ];
    if top_k <= MAX_TOP_K {
        keys.push(dispatch(ranks, top_k, row_bytes));
    }
    let formats: Vec<RowFormat> = match fp8 {
        false => vec![RowFormat::Bf16],
        true if gpu < FP8_SINCE => vec![],
        true => SCALES.map(RowFormat::Fp8).to_vec(),
    };
    for aligned in [false, true] {
        let key = |format| {
            let shape = LowLatencyKey {
                ranks,
                top_k,
                hidden,
                format,
            };
            low_latency(shape, aligned)
        };
        keys.extend(
            formats
                .iter()
                .map(|&format| Key::LowLatencyDispatch(key(row_format(format)))),
        );
        keys.extend(WIRES.map(|wire| Key::LowLatencyCombine(key(combine_wire(wire)))));
    }
    keys
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const HOPPER: ComputeCapability = ComputeCapability { major: 9, minor: 0 };

    fn distinct(hidden: u32, fp8: bool, gpu: ComputeCapability) -> HashSet<Key> {
        let sizes = CallSizes {
            ranks: 8,
            top_k: 6,
            hidden,
            fp8,
        };
        of_calls(sizes, gpu).into_iter().collect()
    }

    #[test]
    fn rejects_use_the_programs_that_are_loaded_before() {
        assert_eq!(dispatch(8, 0, 0), ANY_DISPATCH);
        assert_eq!(combine(combine_dtype(DType::Bf16), 8, 0), ANY_COMBINE);
    }

    #[test]
    fn small_rows_use_the_programs_for_every_shape_alone() {
        let generic = HashSet::from([
            ANY_DISPATCH,
            ANY_COMBINE,
            Key::LowLatencyDispatch(LowLatencyKey::default()),
            Key::LowLatencyCombine(LowLatencyKey::default()),
            Key::LowLatencyBarrier,
        ]);
        for fp8 in [false, true] {
            assert_eq!(distinct(128, fp8, HOPPER), generic);
            assert!(distinct(7168, fp8, HOPPER).is_superset(&generic));
        }
    }

    #[test]
    fn rows_of_models_have_programs_of_their_own() {
        // Dispatch with choices and without, combine, low-latency dispatch and three ways to combine.
        assert_eq!(distinct(7168, false, HOPPER).len(), 5 + 3 + 1 + 3);
        assert_eq!(distinct(7168, true, HOPPER).len(), 5 + 3 + 3 + 3);
        // FP8 rows of 1 KiB do not fill a warp's loop.
        assert_eq!(distinct(1024, true, HOPPER).len(), 5 + 1 + 3 + 3);
    }

    #[test]
    fn gpus_without_fp8_casts_get_no_program_for_them() {
        let ampere = ComputeCapability { major: 8, minor: 0 };
        let casts = |key: &Key| matches!(key, Key::LowLatencyDispatch(key) if key.format > 1);
        assert!(!distinct(7168, true, ampere).iter().any(casts));
        assert_eq!(
            distinct(7168, true, HOPPER)
                .iter()
                .filter(|k| casts(k))
                .count(),
            3
        );
    }
}

//! Choices as the receiver sees them.

use super::{ExpertIndex, ExpertMap};
use crate::topology::Rank;

/// One token's choices as `rank` sees them: `local_idx[k]` is the number of the expert on `rank`
/// (`0..E/R`), or -1 if it is hosted elsewhere or not chosen; `local_weights[k]` is its weight, or 0
/// where the index is -1, whatever stood there (NaN included).
///
/// All four slices are `K` long; with different lengths the shortest counts.
pub fn localize<I: ExpertIndex>(
    topk_idx: &[I],
    topk_weights: &[f32],
    map: &ExpertMap,
    rank: Rank,
    local_idx: &mut [I],
    local_weights: &mut [f32],
) {
    let experts = map.experts_of(rank);
    let (first, end) = (I::narrow(experts.start), I::narrow(experts.end));
    let inputs = topk_idx.iter().zip(topk_weights);
    let outputs = local_idx.iter_mut().zip(local_weights);
    for ((&id, &weight), (local, local_weight)) in inputs.zip(outputs) {
        // `first` is at least 0, so a negative id is none of these experts.
        let hosted = first <= id && id < end;
        *local = if hosted { id.minus(first) } else { I::NONE };
        *local_weight = if hosted { weight } else { 0.0 };
    }
}

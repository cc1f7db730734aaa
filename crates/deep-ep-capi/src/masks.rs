//! Ranks that low-latency calls are made without.

use deep_ep::Rank;

use crate::{
    boundary,
    buffer::{self, BufferObject},
    pointers,
    status::Status,
};

/// Masks a rank (or, with `masked` 0, takes it back): low-latency calls neither send to it nor wait for it,
/// and choices of its experts are dropped. Needs `enable_shrink`. Local. One thread at a time for each
/// buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_update_mask_buffer(
    buffer: *const BufferObject,
    rank: usize,
    masked: i32,
) -> Status {
    boundary::call(|| buffer::get(buffer)?.inner.set_mask(Rank(rank), masked != 0))
}

/// Writes to `mask_status`, which has room for `num_ranks` numbers on the host, 1 for each rank that is
/// masked and 0 for the others. Needs `enable_shrink`. Local. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_query_mask_buffer(
    buffer: *const BufferObject,
    mask_status: *mut i32,
    num_ranks: usize,
) -> Status {
    boundary::call(|| {
        let masks = buffer::get(buffer)?.inner.masks()?;
        if num_ranks != masks.len() {
            let limit = format!("must be {}, the ranks of the buffer", masks.len());
            return Err(deep_ep::Error::invalid("num_ranks", num_ranks, limit));
        }
        let out = pointers::slice_mut(mask_status, num_ranks, "mask_status")?;
        for (out, mask) in out.iter_mut().zip(masks) {
            *out = mask.into();
        }
        Ok(())
    })
}

/// Takes all masks back. Needs `enable_shrink`. Local. One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_clean_mask_buffer(
    buffer: *const BufferObject,
) -> Status {
    boundary::call(|| buffer::get(buffer)?.inner.clear_masks())
}

/// There is nothing to clean between low-latency calls. With `enable_shrink` this is a barrier that masks
/// ranks that do not come, as in DeepEP; the numbers are accepted without effect. Collective with
/// `enable_shrink`, else local.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_clean_low_latency_buffer(
    buffer: *const BufferObject,
    _num_max_dispatch_tokens_per_rank: usize,
    _hidden: usize,
    _num_experts: usize,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        match buffer.inner.config().enable_shrink {
            true => buffer.inner.barrier(),
            false => Ok(()),
        }
    })
}

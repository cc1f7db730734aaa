//! Reading `topk_idx`: either integer type, any strides, checked before it is used.

use crate::{
    dtype::{DType, Element},
    error::{Error, Result},
    tensor::{Device, Tensor},
};

/// The most choices that a token can have, `K`.
pub const MAX_TOP_K: usize = 64;

/// An integer type of `topk_idx`: `i64`, which the frameworks use, or `i32`.
pub trait ExpertIndex: Element + Ord {
    /// What stands for "no choice" in results: -1. In inputs every negative number does.
    const NONE: Self;

    /// The number as 64 bits, sign-extended.
    fn widen(self) -> i64;

    /// A number below 2^31 in this type.
    fn narrow(expert: usize) -> Self;

    /// `self - first`, for `self >= first >= 0`.
    fn minus(self, first: Self) -> Self;

    /// Whether any of `ids` is `num_experts` or more. A loop without branches, for SIMD.
    fn any_beyond(ids: &[Self], num_experts: usize) -> bool;
}

macro_rules! expert_index {
    ($($type:ty),*) => {$(
        impl ExpertIndex for $type {
            const NONE: Self = -1;

            #[inline]
            fn widen(self) -> i64 {
                self.into()
            }

            #[inline]
            fn narrow(expert: usize) -> Self {
                expert as Self
            }

            #[inline]
            fn minus(self, first: Self) -> Self {
                self.wrapping_sub(first)
            }

            fn any_beyond(ids: &[Self], num_experts: usize) -> bool {
                let last = num_experts as Self - 1;
                // For id >= 0 the difference is negative exactly if id > last; `!id` drops the sign
                // of the others. The sign of `signs` is then that of any id beyond.
                let signs = ids
                    .iter()
                    .fold(0, |signs, &id| signs | (last.wrapping_sub(id) & !id));
                signs < 0
            }
        }
    )*};
}

expert_index!(i32, i64);

/// `topk_idx [T, K]` in host memory, of element type `I`, whose ids are all below `E`.
pub(super) struct TopK<'a, I> {
    tensor: Tensor<'a>,
    /// All elements, if they are dense.
    dense: Option<&'a [I]>,
}

impl<'a, I: ExpertIndex> TopK<'a, I> {
    /// Checks every id. `tensor` has passed [`check_shape`] and has element type `I`.
    pub(super) fn new(tensor: &Tensor<'a>, num_experts: usize) -> Result<Self> {
        let this = Self {
            tensor: *tensor,
            dense: tensor.as_slice().ok(),
        };
        let beyond = match this.dense {
            Some(ids) => I::any_beyond(ids, num_experts),
            None => {
                let mut beyond = false;
                this.for_each_row(|_, row| beyond |= I::any_beyond(row, num_experts));
                beyond
            }
        };
        match beyond {
            true => Err(this.first_beyond(num_experts)),
            false => Ok(this),
        }
    }

    /// The error for the lowest `(t, k)` whose id is too large.
    #[cold]
    fn first_beyond(&self, num_experts: usize) -> Error {
        let mut first = None;
        self.for_each_row(|t, row| {
            let beyond = |id: &I| id.widen() >= num_experts as i64;
            if let (None, Some(k)) = (first, row.iter().position(beyond)) {
                first = Some((t, k, row[k].widen()));
            }
        });
        let (t, k, id) = first.unwrap_or_default();
        Error::invalid(
            format!("topk_idx[{t}, {k}]"),
            id,
            format!("must be below num_experts = {num_experts}"),
        )
    }

    /// `K`.
    pub(super) fn top_k(&self) -> usize {
        self.tensor.shape()[1]
    }

    /// Calls `each(t, choices of token t)` for the tokens in ascending order.
    #[inline]
    pub(super) fn for_each_row(&self, mut each: impl FnMut(usize, &[I])) {
        let &[tokens, top_k] = self.tensor.shape() else {
            return;
        };
        if let Some(ids) = self.dense {
            let rows = ids.chunks_exact(top_k);
            return rows.enumerate().for_each(|(t, row)| each(t, row));
        }
        let mut gathered = [I::NONE; MAX_TOP_K];
        for t in 0..tokens {
            if self.tensor.rows_are_dense()
                && let Ok(row) = bytemuck::try_cast_slice(self.tensor.row(t))
            {
                each(t, row);
                continue;
            }
            for (k, id) in gathered[..top_k].iter_mut().enumerate() {
                *id = self.tensor.at(t, k);
            }
            each(t, &gathered[..top_k]);
        }
    }
}

/// Checks that every id of `topk_idx` is below `num_experts`, where routes are not built from it.
///
/// # Errors
/// As [`Routes::rebuild`](super::Routes::rebuild).
pub(crate) fn check_ids(topk_idx: &Tensor<'_>, num_experts: usize) -> Result<()> {
    check_shape(topk_idx)?;
    match topk_idx.dtype() {
        DType::I32 => TopK::<i32>::new(topk_idx, num_experts).map(drop),
        _ => TopK::<i64>::new(topk_idx, num_experts).map(drop),
    }
}

/// The `(T, K)` of a usable `topk_idx`.
///
/// # Errors
/// [`Error::InvalidArgument`] unless it is an `i64` or `i32` tensor `[T, K]` on the host with `K` in
/// `1..=MAX_TOP_K`, fewer than 2^31 tokens and fewer than 2^32 choices.
pub(super) fn check_shape(topk_idx: &Tensor<'_>) -> Result<(usize, usize)> {
    if !matches!(topk_idx.dtype(), DType::I32 | DType::I64) {
        return Err(Error::invalid(
            "topk_idx",
            topk_idx.dtype(),
            "must be i64 or i32",
        ));
    }
    let (tokens, top_k) = check_matrix("topk_idx", topk_idx)?;
    if !(1..=MAX_TOP_K).contains(&top_k) {
        return Err(Error::invalid(
            "top-k of topk_idx",
            top_k,
            format!("must be 1 to {MAX_TOP_K}"),
        ));
    }
    if tokens as u64 * top_k as u64 > u64::from(u32::MAX) {
        return Err(Error::invalid(
            "topk_idx",
            format!("[{tokens}, {top_k}]"),
            "must hold fewer than 2^32 choices",
        ));
    }
    Ok((tokens, top_k))
}

/// The two extents of a host matrix whose rows are tokens.
pub(super) fn check_matrix(name: &'static str, tensor: &Tensor<'_>) -> Result<(usize, usize)> {
    if tensor.device() != Device::Host {
        return Err(Error::invalid(
            name,
            format!("on {:?}", tensor.device()),
            "must be on the host",
        ));
    }
    let &[tokens, columns] = tensor.shape() else {
        return Err(Error::invalid(
            name,
            format!("of shape {:?}", tensor.shape()),
            "must have two dimensions",
        ));
    };
    if tokens >= 1 << 31 {
        return Err(Error::invalid(
            name,
            format!("{tokens} tokens long"),
            "must have fewer than 2^31 tokens",
        ));
    }
    Ok((tokens, columns))
}

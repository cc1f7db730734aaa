//! The block in which a dispatch's sender keeps what travels with rows, for receivers to read.
//!
//! ```text
//! lists     u32 [rows over all ranks]   source tokens of the rows for rank 0, rank 1, ...
//! experts   u32 [E]                     choices of each expert
//! topk_idx  i32 [T, K]                  global expert ids, -1 for no choice
//! weights   f32 [T, K]
//! scales    u32 [T, S]                  4-byte scales, bit for bit
//! ```
//! Sections that a call does not have are empty; each begins at a multiple of 64 bytes. Sender and
//! receiver compute the same addresses from the announcement.

use super::super::{announce::Announcement, group::Group};
use crate::{
    buffer::TopK,
    dtype::{DType, Element},
    error::{Error, Result},
    routing::Routes,
    tensor::Tensor,
};

/// Set in `Terms::format` when choices travel.
pub(super) const HAS_TOPK: u64 = 1;
/// Set in `Terms::format` when weights travel.
pub(super) const HAS_WEIGHTS: u64 = 2;

/// Elements of each section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sections {
    lists: usize,
    experts: usize,
    topk_idx: usize,
    weights: usize,
    scales: usize,
}

impl Sections {
    /// Those of a sender that announces `from`; `None` when its numbers are absurd.
    pub(super) fn of(from: &Announcement) -> Option<Self> {
        let terms = &from.terms;
        let lists = from
            .rows
            .iter()
            .try_fold(0usize, |sum, &rows| sum.checked_add(rows as usize))?;
        let choices = from.tokens.checked_mul(terms.top_k)?;
        let this = Self {
            lists,
            experts: terms.num_experts,
            topk_idx: if terms.format & HAS_TOPK != 0 {
                choices
            } else {
                0
            },
            weights: if terms.format & HAS_WEIGHTS != 0 {
                choices
            } else {
                0
            },
            scales: from.tokens.checked_mul(terms.scale_columns)?,
        };
        let total = this
            .sizes()
            .iter()
            .try_fold(0usize, |sum, &n| sum.checked_add(n))?;
        (total < isize::MAX as usize / 8).then_some(this)
    }

    fn sizes(&self) -> [usize; 5] {
        [
            self.lists,
            self.experts,
            self.topk_idx,
            self.weights,
            self.scales,
        ]
    }

    /// Bytes of the block.
    pub(super) fn bytes(&self) -> usize {
        self.sizes()
            .iter()
            .map(|n| (n * 4).next_multiple_of(64))
            .sum()
    }

    fn offset(&self, section: usize) -> usize {
        self.sizes()[..section]
            .iter()
            .map(|n| (n * 4).next_multiple_of(64))
            .sum()
    }
}

/// A block that nobody writes any more.
#[derive(Clone, Copy)]
pub(super) struct Metadata<'a> {
    pub(super) lists: &'a [u32],
    pub(super) experts: &'a [u32],
    pub(super) topk_idx: &'a [i32],
    pub(super) weights: &'a [f32],
    pub(super) scales: &'a [u32],
}

/// A block that is being filled.
pub(super) struct MetadataMut<'a> {
    pub(super) lists: &'a mut [u32],
    pub(super) experts: &'a mut [u32],
    pub(super) topk_idx: &'a mut [i32],
    pub(super) weights: &'a mut [f32],
    pub(super) scales: &'a mut [u32],
}

impl<'a> Metadata<'a> {
    /// The block of rank `from`, as it announced it. It stays as it is until this rank says that it
    /// has finished the call.
    pub(super) fn of(group: &'a Group, from: usize, announced: &Announcement) -> Result<Self> {
        let broken = || {
            Error::invalid(
                format!("metadata of rank {from}"),
                format!("{} bytes at {}", announced.metadata_len, announced.metadata),
                "must fit what that rank announced",
            )
        };
        let sections = Sections::of(announced).ok_or_else(broken)?;
        if announced.metadata_len as usize != sections.bytes()
            || !announced.metadata.is_multiple_of(64)
        {
            return Err(broken());
        }
        let base = group
            .memory(from)
            .checked(announced.metadata, announced.metadata_len)?;
        // SAFETY: the owner wrote the block before it announced it and does not touch it until
        // every rank has finished the call; the range was checked and stays mapped for 'a; the
        // sections are aligned and disjoint, and any bits are valid for their types.
        unsafe {
            Ok(Self {
                lists: section(base, &sections, 0),
                experts: section(base, &sections, 1),
                topk_idx: section(base, &sections, 2),
                weights: section(base, &sections, 3),
                scales: section(base, &sections, 4),
            })
        }
    }

    /// The source tokens of the rows for rank `to`.
    pub(super) fn tokens_for(&self, to: usize, announced: &Announcement) -> Result<&'a [u32]> {
        let start: usize = announced.rows[..to].iter().map(|&rows| rows as usize).sum();
        let list = &self.lists[start..start + announced.rows[to] as usize];
        match list
            .iter()
            .find(|&&token| token as usize >= announced.tokens)
        {
            None => Ok(list),
            Some(token) => Err(Error::invalid(
                "source token of a received row",
                token,
                format!("must be below the {} tokens of its rank", announced.tokens),
            )),
        }
    }
}

impl<'a> MetadataMut<'a> {
    /// Views of a block of this rank.
    ///
    /// # Safety
    /// `base` points to `sections.bytes()` bytes, aligned to 64, that nobody else accesses for 'a.
    pub(super) unsafe fn new(base: *mut u8, sections: &Sections) -> Self {
        // SAFETY: the caller's promise; sections are aligned and disjoint.
        unsafe {
            Self {
                lists: section_mut(base, sections, 0),
                experts: section_mut(base, sections, 1),
                topk_idx: section_mut(base, sections, 2),
                weights: section_mut(base, sections, 3),
                scales: section_mut(base, sections, 4),
            }
        }
    }
}

impl MetadataMut<'_> {
    /// Writes what goes with this rank's rows.
    pub(super) fn fill(
        self,
        routes: &Routes,
        topk: Option<&TopK<'_>>,
        tokens_per_expert: &[u32],
        scales: Option<&Tensor<'_>>,
    ) {
        self.lists.copy_from_slice(routes.tokens_of_ranks().0);
        self.experts.copy_from_slice(tokens_per_expert);
        if let Some(topk) = topk {
            // Ids were checked to lie below the number of experts, which is below 2^31.
            match topk.idx.dtype() {
                DType::I64 => gather(&topk.idx, self.topk_idx, |id: i64| id.max(-1) as i32),
                _ => gather(&topk.idx, self.topk_idx, |id: i32| id.max(-1)),
            }
            if let Some(weights) = &topk.weights {
                gather(weights, self.weights, |weight: f32| weight);
            }
        }
        match scales {
            None => {}
            Some(scales) if scales.dtype() == DType::F32 => {
                gather(scales, self.scales, f32::to_bits);
            }
            Some(scales) => gather(scales, self.scales, |bits: i32| bits as u32),
        }
    }
}

/// The elements of a two-dimensional tensor, row-major.
fn gather<T: Element, O>(from: &Tensor<'_>, to: &mut [O], value: impl Fn(T) -> O) {
    let columns = from.shape()[1];
    for (i, to) in to.chunks_exact_mut(columns).enumerate() {
        if from.rows_are_dense() {
            let row: &[T] = bytemuck::cast_slice(from.row(i));
            to.iter_mut()
                .zip(row)
                .for_each(|(to, &from)| *to = value(from));
        } else {
            to.iter_mut()
                .enumerate()
                .for_each(|(j, to)| *to = value(from.at(i, j)));
        }
    }
}

/// # Safety
/// As [`Metadata::of`] says.
unsafe fn section<'a, T>(base: *const u8, sections: &Sections, i: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(base.add(sections.offset(i)).cast(), sections.sizes()[i]) }
}

/// # Safety
/// As [`MetadataMut::new`] says.
unsafe fn section_mut<'a, T>(base: *mut u8, sections: &Sections, i: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe {
        std::slice::from_raw_parts_mut(base.add(sections.offset(i)).cast(), sections.sizes()[i])
    }
}

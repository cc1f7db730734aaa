//! Rows in memory that other threads work on at the same time, and copying them.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{
    copy::{self, Store, store_fence},
    workers::Workers,
};
use crate::tensor::{Tensor, TensorMut};

/// Rows that are only read.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    base: *const u8,
    stride: usize,
    rows: usize,
    len: usize,
}

/// Rows that are written, each by one thread of one rank.
#[derive(Clone, Copy)]
pub(super) struct RowsMut {
    base: *mut u8,
    stride: usize,
    rows: usize,
    len: usize,
}

// SAFETY: whoever makes `Rows` promises that they are not written while it is used.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}
// SAFETY: whoever makes `RowsMut` promises that each row is written by one thread only.
unsafe impl Send for RowsMut {}
// SAFETY: as above.
unsafe impl Sync for RowsMut {}

impl Rows {
    /// `rows` rows of `len` bytes, `stride` bytes apart.
    ///
    /// # Safety
    /// They are readable and nobody writes them while this or a copy of it is used.
    pub(super) unsafe fn new(base: *const u8, stride: usize, rows: usize, len: usize) -> Self {
        Self {
            base,
            stride,
            rows,
            len,
        }
    }

    /// The rows of a host tensor whose rows are dense. To be used while the tensor's borrow lasts.
    pub(super) fn of(tensor: &Tensor<'_>) -> Self {
        let stride = tensor.strides()[0] * tensor.dtype().size();
        Self {
            base: tensor.as_ptr(),
            stride,
            rows: tensor.shape()[0],
            len: tensor.row_bytes(),
        }
    }

    /// No rows.
    pub(super) const EMPTY: Self = Self {
        base: std::ptr::null(),
        stride: 0,
        rows: 0,
        len: 0,
    };

    /// The rows from `first` on.
    pub(super) fn rows_from(&self, first: usize) -> Self {
        assert!(first <= self.rows);
        Self {
            base: self.base.wrapping_add(first * self.stride),
            rows: self.rows - first,
            ..*self
        }
    }

    pub(super) fn row(&self, i: usize) -> &[u8] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: in range, and as `new` demands.
        unsafe { std::slice::from_raw_parts(self.base.add(i * self.stride), self.len) }
    }
}

/// A row to be written.
#[derive(Clone, Copy)]
pub(super) struct RowMut {
    data: *mut u8,
    len: usize,
}

impl RowsMut {
    /// `rows` rows of `len` bytes, `stride` bytes apart.
    ///
    /// # Safety
    /// They are writable, nobody reads them, and no other rank or thread writes a row that is
    /// written through this, while this or a copy of it is used.
    pub(super) unsafe fn new(base: *mut u8, stride: usize, rows: usize, len: usize) -> Self {
        Self {
            base,
            stride,
            rows,
            len,
        }
    }

    /// The rows of a host tensor whose rows are dense. To be used while the tensor's borrow lasts.
    pub(super) fn of(tensor: &mut TensorMut<'_>) -> Self {
        Self {
            stride: tensor.strides()[0] * tensor.dtype().size(),
            rows: tensor.shape()[0],
            len: tensor.row_bytes(),
            base: tensor.as_mut_ptr(),
        }
    }

    /// The rows from `first` on.
    pub(super) fn rows_from(&self, first: usize) -> Self {
        assert!(first <= self.rows);
        Self {
            base: self.base.wrapping_add(first * self.stride),
            rows: self.rows - first,
            ..*self
        }
    }

    /// Bytes of all rows.
    pub(super) fn bytes(&self) -> usize {
        self.rows * self.len
    }

    pub(super) fn row(&self, i: usize) -> RowMut {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        RowMut {
            data: self.base.wrapping_add(i * self.stride),
            len: self.len,
        }
    }
}

impl RowMut {
    /// The bytes.
    ///
    /// # Safety
    /// Nobody else accesses the row while the slice is used.
    pub(super) unsafe fn bytes<'a>(self) -> &'a mut [u8] {
        // SAFETY: inside the rows that `RowsMut::new` was given; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }
}

/// Copies rows and counts their bytes.
pub(super) struct Copier {
    bytes: usize,
}

impl Copier {
    /// Copies one row.
    pub(super) fn copy(&mut self, from: &[u8], to: RowMut, store: Store) {
        assert_eq!(from.len(), to.len);
        // SAFETY: `to` is writable for its length and does not overlap what is borrowed as `from`.
        unsafe { copy::copy(to.data, from.as_ptr(), from.len(), store) };
        self.bytes += from.len();
    }

    /// Copies one row to several places; it is read from memory once.
    pub(super) fn copy_to_each(
        &mut self,
        from: &[u8],
        to: impl Iterator<Item = RowMut>,
        store: Store,
    ) {
        to.for_each(|to| self.copy(from, to, store));
    }
}

/// Calls `work` for each of `0..items`, on several threads, and returns the bytes copied by it. All
/// copies are visible to whoever sees a message that is posted afterwards.
pub(super) fn copy_each(
    workers: &Workers,
    limit: Option<usize>,
    items: usize,
    row_bytes: usize,
    work: impl Fn(usize, &mut Copier) + Sync,
) -> usize {
    let bytes = AtomicUsize::new(0);
    workers.run(items, (64 << 10) / row_bytes.max(1), limit, |range| {
        let mut copier = Copier { bytes: 0 };
        range.for_each(|i| work(i, &mut copier));
        store_fence();
        bytes.fetch_add(copier.bytes, Ordering::Relaxed);
    });
    bytes.into_inner()
}

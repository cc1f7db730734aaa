//! Comparison of bits, which names the first difference.

use std::fmt;

use deep_ep::{Rank, Tensor};

/// Whose result is compared, and what it is.
#[derive(Clone, Copy)]
pub(crate) struct Of<'a> {
    /// The rank that has the result.
    pub(crate) rank: Rank,
    /// The result.
    pub(crate) what: &'a str,
}

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.what)
    }
}

/// Compares rows of elements of `size` bytes; `describe` says where a row comes from.
pub(crate) fn same_row(
    of: Of<'_>,
    row: usize,
    size: usize,
    expected: &[u8],
    found: &[u8],
    describe: impl Fn(usize) -> String,
) {
    if expected == found {
        return;
    }
    let place = || format!("{of}, row {row} ({})", describe(row));
    assert_eq!(expected.len(), found.len(), "bytes of {}", place());
    let elements = expected.chunks(size).zip(found.chunks(size));
    let differs = |&(_, (expected, found)): &(usize, (&[u8], &[u8]))| expected != found;
    let (column, (expected, found)) = elements.enumerate().find(differs).expect("they differ");
    panic!(
        "{}, column {column}: expected {}, found {}",
        place(),
        hex(expected),
        hex(found)
    );
}

/// Compares the first rows of `found`, which may be strided, with `expected`.
pub(crate) fn same_rows(
    of: Of<'_>,
    expected: &[&[u8]],
    found: &Tensor<'_>,
    describe: impl Fn(usize) -> String,
) {
    assert!(
        found.shape()[0] >= expected.len(),
        "{of}: {} rows expected, found {:?}",
        expected.len(),
        found
    );
    for (row, expected) in expected.iter().enumerate() {
        same_row(
            of,
            row,
            found.dtype().size(),
            expected,
            found.row(row),
            &describe,
        );
    }
}

/// Compares dense values bit for bit, `columns` of them in a row.
pub(crate) fn same_values<T: bytemuck::NoUninit + fmt::Debug>(
    of: Of<'_>,
    columns: usize,
    expected: &[T],
    found: &[T],
) {
    assert_eq!(expected.len(), found.len(), "number of values of {of}");
    for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert!(
            bytemuck::bytes_of(expected) == bytemuck::bytes_of(found),
            "{of}, row {}, column {}: expected {expected:?} ({}), found {found:?} ({})",
            i / columns,
            i % columns,
            hex(bytemuck::bytes_of(expected)),
            hex(bytemuck::bytes_of(found)),
        );
    }
}

/// The element as a number: bytes are little-endian.
fn hex(element: &[u8]) -> String {
    let digits: String = element
        .iter()
        .rev()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("0x{digits}")
}

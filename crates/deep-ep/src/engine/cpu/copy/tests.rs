use proptest::prelude::*;

use super::*;

const GUARD: u8 = 0xee;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// A way to copy `len` bytes from one address to another.
type Copier<'a> = &'a dyn Fn(*mut u8, *const u8, usize);

/// Copies `len` bytes from offset `from` to offset `to` of a line and checks the bytes around.
fn check(copier: Copier<'_>, to: usize, from: usize, len: usize) {
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Line(#[allow(dead_code)] [u8; 64]);
    let lines = len / 64 + 4;
    let source = pattern(from + len);
    let mut lines = vec![Line([GUARD; 64]); lines];
    let dst: &mut [u8] = {
        let bytes = lines.len() * 64;
        // SAFETY: the lines are plain bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), bytes) }
    };
    copier(dst[64 + to..].as_mut_ptr(), source[from..].as_ptr(), len);
    store_fence();
    let (before, rest) = dst.split_at(64 + to);
    let (copied, after) = rest.split_at(len);
    assert!(copied == &source[from..], "to {to}, from {from}, len {len}");
    assert!(
        before.iter().chain(after).all(|&byte| byte == GUARD),
        "to {to}, from {from}, len {len}"
    );
}

#[test]
fn all_lengths_and_offsets_equal_memcpy() {
    for store in [Store::Cached, Store::Streaming] {
        // SAFETY: `check` passes ranges of its own buffers.
        let copier = |dst, src, len| unsafe { copy(dst, src, len, store) };
        for to in 0..64 {
            for len in 0..300 {
                check(&copier, to, (to * 13 + len) % 64, len);
            }
        }
        for from in 0..64 {
            check(&copier, 0, from, 300);
            check(&copier, 17, from, 299);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_instruction_set_copies_the_same() {
    for isa in stream::Isa::available() {
        // SAFETY: `check` passes ranges of its own buffers, and the processor has `isa`.
        let copier = |dst, src, len| unsafe { stream::copy(isa, dst, src, len) };
        for to in 0..64 {
            for len in (0..300).chain([1024, 4096, 14336 + to]) {
                check(&copier, to, (to * 29 + len) % 64, len);
            }
        }
    }
}

#[test]
fn slices_and_rows_are_counted_by_kind() {
    let stats = CopyStats::default();
    let source = pattern(4000);
    let mut dst = vec![0; 4000];
    copy_slice(&mut dst, &source, Store::Streaming, &stats);
    assert_eq!(dst, source);
    dst.fill(0);
    let rows = (0..40).map(|row| (row * 100, (39 - row) * 100));
    // SAFETY: 40 rows of 100 bytes inside both vectors.
    unsafe {
        copy_rows(
            dst.as_mut_ptr(),
            source.as_ptr(),
            100,
            rows,
            Store::Cached,
            &stats,
        );
        let mut index = [0u8; 8];
        copy_metadata(index.as_mut_ptr(), source.as_ptr(), 8, &stats);
    }
    for row in 0..40 {
        assert_eq!(dst[row * 100..][..100], source[(39 - row) * 100..][..100]);
    }
    assert_eq!(stats.rows_bytes.into_inner(), 8000);
    assert_eq!(stats.metadata_bytes.into_inner(), 8);
}

#[test]
#[should_panic(expected = "differ in length")]
fn slices_of_different_lengths_are_a_mistake() {
    copy_slice(&mut [0; 4], &[0; 5], Store::Cached, &CopyStats::default());
}

#[test]
fn short_rows_and_small_calls_are_not_streamed() {
    assert_eq!(Store::for_rows(272, 1 << 30, 1 << 20), Store::Cached);
    assert_eq!(Store::for_rows(14336, 1 << 19, 1 << 20), Store::Cached);
    assert_eq!(Store::for_rows(14336, 1 << 30, 1 << 20), Store::Streaming);
}

proptest! {
    #[test]
    fn one_source_reaches_many_places(
        len in 0usize..50_000,
        offsets in prop::collection::vec(0usize..64, 0..9),
        streaming in any::<bool>(),
    ) {
        let store = if streaming { Store::Streaming } else { Store::Cached };
        let source = pattern(len);
        let mut places: Vec<_> = offsets.iter().map(|_| vec![GUARD; len + 128]).collect();
        let dsts: Vec<_> = places
            .iter_mut()
            .zip(&offsets)
            .map(|(place, &offset)| place[offset..].as_mut_ptr())
            .collect();
        // SAFETY: every place has `len` bytes behind its offset.
        unsafe { copy_to_many(&dsts, source.as_ptr(), len, store) };
        store_fence();
        for (place, &offset) in places.iter().zip(&offsets) {
            prop_assert_eq!(&place[offset..][..len], &source[..]);
            let (before, after) = (&place[..offset], &place[offset + len..]);
            prop_assert!(before.iter().chain(after).all(|&byte| byte == GUARD));
        }
    }
}

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
fn short_rows_and_small_calls_are_not_streamed() {
    let l2 = 2 << 20;
    let store = |row, bytes, row_use| Store::for_rows(row, bytes, row_use, l2);
    assert_eq!(store(14336, 17 * l2, RowUse::Output), Store::Streaming);
    assert_eq!(store(14336, 16 * l2, RowUse::Output), Store::Cached);
    assert_eq!(store(14336, 16 * l2, RowUse::Staging), Store::Streaming);
    assert_eq!(store(14336, 6 * l2, RowUse::Staging), Store::Cached);
    assert_eq!(store(272, 1 << 40, RowUse::Staging), Store::Cached);
}

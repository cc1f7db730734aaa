//! LogFMT-10: what it promises, and what it does with garbage.

use deep_ep::codec::{
    f32_to_bf16,
    logfmt::{DecodeError, decode_row, encode_row, max_encoded_bytes},
};
use proptest::prelude::*;

use crate::rows::{Random, bits};

/// Encodes and decodes; the values, and the encoded bytes.
fn round_trip(x: &[f32]) -> (Vec<f32>, Vec<u8>) {
    let mut bytes = vec![0xaa; max_encoded_bytes(x.len())];
    let used = encode_row(x, &mut bytes);
    bytes.truncate(used);
    let mut out = vec![f32::NAN; x.len()];
    assert_eq!(decode_row(&bytes, &mut out), Ok(used));
    (out, bytes)
}

/// `1 - 2<a,b> / (<a,a> + <b,b>)`.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    1.0 - 2.0 * dot(a, b) / (dot(a, a) + dot(b, b))
}

#[test]
fn random_rows_stay_within_the_criteria() {
    let mut random = Random(1);
    type Draw = fn(&mut Random) -> f32;
    let kinds: [(&str, Draw); 5] = [
        ("normal", Random::normal),
        ("uniform", Random::uniform),
        ("uniform from 0", |random| random.uniform().abs()),
        ("normal as bf16", |random| {
            f32_to_bf16(random.normal()).to_f32()
        }),
        ("small normal", |random| random.normal() * 1e-5),
    ];
    for (name, draw) in kinds {
        for hidden in [2048, 4096, 7168] {
            let (mut values, mut outs, mut used) = (Vec::new(), Vec::new(), 0);
            for _ in 0..32 {
                let x: Vec<f32> = (0..hidden).map(|_| draw(&mut random)).collect();
                let (out, bytes) = round_trip(&x);
                assert!(difference(&x, &out) < 1e-5, "{name}, {hidden}");
                used += bytes.len();
                values.extend(x);
                outs.extend(out);
            }
            let ratio = used as f64 / (2 * values.len()) as f64;
            println!(
                "{name}, {hidden}: {:.2e}, {ratio:.4} of bf16",
                difference(&values, &outs)
            );
            assert!(ratio <= 0.70, "{name}, {hidden}: {ratio}");
        }
    }
}

#[test]
fn every_value_of_a_logarithmic_block_is_within_a_step_or_near_zero() {
    let mut random = Random(2);
    for _ in 0..200 {
        let x: Vec<f32> = (0..128).map(|_| random.normal()).collect();
        let (out, _) = round_trip(&x);
        let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (x, out) in x.iter().zip(&out) {
            let close = (out / x - 1.0).abs() < 0.0056;
            assert!(
                close || (x - out).abs() <= max / 500.0,
                "{x} {out}, largest {max}"
            );
        }
    }
}

#[test]
fn zeros_cost_a_header_and_stay_zero_among_others() {
    let (out, bytes) = round_trip(&[0.0; 1024]);
    assert_eq!((out, bytes.len()), (vec![0.0; 1024], 32));
    let mut x = vec![0.0; 256];
    (x[1], x[2], x[130], x[131]) = (3.0, -0.0, -2.0, 1e-3);
    let (out, _) = round_trip(&x);
    for (i, (x, out)) in x.iter().zip(out).enumerate() {
        assert!(
            x.abs() <= 1e-3 && out == 0.0 || (out / x - 1.0).abs() < 0.006,
            "{i}: {x} {out}"
        );
    }
    assert!(x[2].is_sign_negative());
}

#[test]
fn equal_values_and_powers_of_two_are_exact() {
    for value in [1.0f32, -4.0, 2f32.powi(-100), 2f32.powi(127)] {
        let x = vec![value; 128];
        assert_eq!(round_trip(&x), (x, round_trip(&[value; 128]).1));
    }
    let (out, _) = round_trip(&[1.5; 128]);
    assert!(out.iter().all(|x| (x / 1.5 - 1.0).abs() < 2e-5));
}

#[test]
fn blocks_that_would_suffer_travel_as_bf16() {
    let spread = |random: &mut Random| random.normal() * 2f32.powi(random.below(40) as i32 - 20);
    let mut random = Random(3);
    let mut outlier: Vec<f32> = (0..128).map(|_| random.normal()).collect();
    outlier[77] = 1e5;
    let wide: Vec<f32> = (0..128).map(|_| spread(&mut random)).collect();
    let tiny: Vec<f32> = (0..128).map(|_| random.normal() * 1e-40).collect();
    let mut infinite = vec![1.0; 128];
    (infinite[0], infinite[1], infinite[2]) = (f32::INFINITY, f32::NAN, f32::MAX);
    for x in [outlier, wide, tiny, infinite] {
        let expected: Vec<f32> = x.iter().map(|x| f32_to_bf16(*x).to_f32()).collect();
        let (out, bytes) = round_trip(&x);
        assert_eq!((bits(&out), bytes.len()), (bits(&expected), 16 + 256));
    }
}

#[test]
fn any_multiple_of_eight_is_a_length() {
    let mut random = Random(4);
    for hidden in (0..=1032).step_by(8) {
        let x = random.f32_row(hidden, 0);
        let (out, bytes) = round_trip(&x);
        assert!(bytes.len().is_multiple_of(16) && bytes.len() <= max_encoded_bytes(hidden));
        assert!(hidden == 0 || difference(&x, &out) < 2e-5, "{hidden}");
    }
}

/// The bytes of the format must not change unnoticed, and are the same on every machine: an
/// implementation in another language has to reach these FNV-1a hashes too.
#[test]
fn encoded_bytes_are_these() {
    let mut random = Random(5);
    let x: Vec<f32> = (0..7168)
        .map(|_| f32::from_bits(random.bits() as u32 >> 5 | 0x3c00_0000))
        .enumerate()
        .map(|(i, x)| if i % 7 == 0 { -x } else { x })
        .collect();
    let (out, bytes) = round_trip(&x);
    let hash = |bytes: &mut dyn Iterator<Item = u8>| {
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    let encoded = hash(&mut bytes.iter().copied());
    let decoded = hash(&mut out.iter().flat_map(|x| x.to_le_bytes()));
    let expected = (9184, 13_539_806_271_573_333_971, 13_661_113_730_123_999_514);
    assert_eq!((bytes.len(), encoded, decoded), expected);
}

#[test]
fn a_short_row_or_a_wrong_header_is_an_error() {
    let x = Random(6).f32_row(136, 0);
    let (_, bytes) = round_trip(&x);
    let mut out = vec![0.0; 136];
    for length in 0..bytes.len() {
        let error = decode_row(&bytes[..length], &mut out).unwrap_err();
        assert!(
            matches!(error, DecodeError::Truncated { needed, got } if got == length && needed > got)
        );
    }
    let mut wrong = bytes.clone();
    wrong[..4].copy_from_slice(&0x3f80_3f81u32.to_le_bytes());
    let header = DecodeError::Header {
        block: 0,
        header: 0x3f80_3f81,
    };
    assert_eq!(decode_row(&wrong, &mut out), Err(header));
}

proptest! {
    #[test]
    fn garbage_never_panics(
        bytes in prop::collection::vec(any::<u8>(), 0..2048),
        blocks in 0usize..6,
        rest in 0usize..16,
    ) {
        let mut out = vec![0.0; 128 * blocks + 8 * rest];
        let _ = decode_row(&bytes, &mut out);
    }

    #[test]
    fn damaged_rows_never_panic(seed: u64, hits in prop::collection::vec((any::<u16>(), any::<u8>()), 1..8)) {
        let x = Random(seed).f32_row(1000, (seed % 4) as u8);
        let (mut out, mut bytes) = round_trip(&x);
        for (at, value) in hits {
            let at = usize::from(at) % bytes.len();
            bytes[at] = value;
        }
        let _ = decode_row(&bytes, &mut out);
    }
}

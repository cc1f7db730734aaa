//! fp8 against `float8` and against the definition in f64.

use deep_ep::codec::{
    ScaleFormat, dequantize_row, e4m3_to_f32, f32_to_e4m3, pack_ue8m0, quantize_f32_block,
    quantize_row, ue8m0_from_scale, ue8m0_to_scale, unpack_ue8m0,
};
use float8::F8E4M3 as Oracle;
use half::bf16;

use crate::rows::{Random, bits};

#[test]
fn all_codes_decode_as_the_specification_says() {
    for code in 0..=255u8 {
        let value = e4m3_to_f32(code);
        let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), code & 7);
        if code & 0x7f == 0x7f {
            assert_eq!(value.to_bits(), 0x7fff_ffff);
            continue;
        }
        let magnitude = match exponent {
            0 => f64::from(mantissa) / 8.0 * 2f64.powi(-6),
            _ => (1.0 + f64::from(mantissa) / 8.0) * 2f64.powi(exponent - 7),
        };
        let exact = (if sign == 1 { -magnitude } else { magnitude }) as f32;
        assert_eq!(value.to_bits(), exact.to_bits(), "{code:#x}");
        assert_eq!(
            value.to_bits(),
            Oracle::from_bits(code).to_f32().to_bits(),
            "{code:#x}"
        );
        assert_eq!(
            f32_to_e4m3(value),
            code,
            "a code is what its value encodes to"
        );
    }
}

#[test]
fn encoding_agrees_with_float8() {
    let check = |bits: u32| {
        let x = f32::from_bits(bits);
        let code = f32_to_e4m3(x);
        if x.is_nan() {
            assert_eq!(code, 0x7f, "{bits:#x}");
        } else {
            assert_eq!(code, Oracle::from_f32(x).to_bits(), "{x:e} ({bits:#x})");
        }
    };
    (0..=u32::MAX).step_by(1 << 8).for_each(check);
    (0..=u32::MAX).step_by(997).for_each(check);
}

#[test]
fn blocks_of_f32_are_cast_as_those_of_bf16() {
    let mut random = Random(11);
    for length in [1, 7, 127, 128] {
        for mix in 0..4 {
            let row = random.bf16_row(length, mix);
            let (mut expected, mut scale) = (vec![0; length], [0.0]);
            quantize_row(&row, &mut expected, &mut scale, ScaleFormat::F32);
            let wide: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
            let mut codes = vec![0; length];
            let found = quantize_f32_block(&wide, &mut codes);
            assert_eq!((found.to_bits(), codes), (scale[0].to_bits(), expected));
        }
    }
}

#[test]
fn ties_go_to_even_and_their_neighbours_to_the_nearer_code() {
    for code in 0..0x7eu8 {
        let [low, high] = [code, code + 1].map(|code| f64::from(e4m3_to_f32(code)));
        let tie = ((low + high) / 2.0) as f32;
        assert_eq!(f64::from(tie), (low + high) / 2.0, "f32 holds every tie");
        for (sign, flip) in [(0, 0), (0x80, 0x8000_0000u32)] {
            let at = |bits: u32| f32_to_e4m3(f32::from_bits(bits ^ flip));
            assert_eq!(at(tie.to_bits()), sign | (code + (code & 1)));
            assert_eq!(at(tie.to_bits() - 1), sign | code);
            assert_eq!(at(tie.to_bits() + 1), sign | (code + 1));
        }
    }
}

#[test]
fn encoding_saturates_and_keeps_signs_of_zero() {
    for x in [
        448.0,
        448.1,
        463.9,
        464.0,
        465.0,
        480.0,
        1e9,
        f32::MAX,
        f32::INFINITY,
    ] {
        assert_eq!((f32_to_e4m3(x), f32_to_e4m3(-x)), (0x7e, 0xfe), "{x}");
    }
    for x in [0.0, 1e-45, f32::MIN_POSITIVE, 0.000_976_562_5] {
        assert_eq!((f32_to_e4m3(x), f32_to_e4m3(-x)), (0, 0x80), "{x:e}");
    }
}

/// The cast of a block, from the words of its definition.
fn oracle(x: &[bf16], power_of_two: bool) -> (f32, Vec<u8>) {
    let mut amax = 1e-4f32;
    for x in x {
        if !x.is_nan() && x.to_f32().abs() > amax {
            amax = x.to_f32().abs();
        }
    }
    let quotient = amax * (1.0f32 / 448.0f32);
    let (scale, factor) = if power_of_two {
        let e = (-126..=127).find(|e| 2f64.powi(*e) >= f64::from(quotient));
        e.map_or((f32::INFINITY, 0.0), |e| {
            (2f64.powi(e) as f32, 2f64.powi(-e) as f32)
        })
    } else {
        (quotient, 448.0f32 / amax)
    };
    let code = |x: &bf16| {
        let scaled = x.to_f32() * factor;
        match scaled.is_nan() {
            true => 0x7f,
            false => Oracle::from_f32(scaled).to_bits(),
        }
    };
    (scale, x.iter().map(code).collect())
}

fn check_against_oracle(x: &[bf16]) {
    for format in [
        ScaleFormat::F32,
        ScaleFormat::PowerOfTwo,
        ScaleFormat::Ue8m0,
    ] {
        let mut codes = vec![0; x.len()];
        let mut scales = vec![0.0; x.len().div_ceil(128)];
        quantize_row(x, &mut codes, &mut scales, format);
        for (i, block) in x.chunks(128).enumerate() {
            let (scale, expected) = oracle(block, format != ScaleFormat::F32);
            assert_eq!(
                scales[i].to_bits(),
                scale.to_bits(),
                "{format:?}, block {i}"
            );
            assert_eq!(
                &codes[128 * i..][..block.len()],
                &expected,
                "{format:?}, block {i}"
            );
        }
    }
}

#[test]
fn rows_are_cast_as_defined() {
    let mut random = Random(1);
    for mix in 0..4 {
        for hidden in [0, 8, 128, 136, 512, 2048, 7168] {
            for _ in 0..4 {
                check_against_oracle(&random.bf16_row(hidden, mix));
            }
        }
    }
}

#[test]
fn amax_at_and_beside_every_power_of_two_and_multiple_of_448() {
    let mut random = Random(2);
    for exponent in -133..=127 {
        for base in [1.0, 1.75] {
            let amax = bf16::from_f64(base * 2f64.powi(exponent)).to_bits();
            for bits in amax.saturating_sub(1)..=amax + 1 {
                let amax = bf16::from_bits(bits);
                let mut x = [amax; 128];
                for x in &mut x[1..] {
                    *x = bf16::from_f32(amax.to_f32() * random.uniform());
                }
                check_against_oracle(&x);
            }
        }
    }
}

#[test]
fn nan_and_infinity_in_a_block_do_as_documented() {
    let mut x = [bf16::from_f32(-1.5); 256];
    (x[3], x[130]) = (-bf16::NAN, bf16::NEG_INFINITY);
    for format in [ScaleFormat::F32, ScaleFormat::Ue8m0] {
        let (mut codes, mut scales) = ([0; 256], [0.0; 2]);
        quantize_row(&x, &mut codes, &mut scales, format);
        assert_eq!((codes[3], codes[4] & 0x80), (0x7f, 0x80));
        assert!(scales[0].is_finite() && codes[4] & 0x7f > 0x70);
        assert_eq!(
            (scales[1], codes[130], codes[131]),
            (f32::INFINITY, 0x7f, 0x80)
        );
        let mut back = [bf16::ZERO; 256];
        dequantize_row(&codes, &scales, &mut back);
        assert!(back[128..].iter().all(|x| x.to_bits() == 0x7fff));
        assert!((back[4].to_f32() + 1.5).abs() < 0.1);
    }
}

#[test]
fn casting_back_multiplies_and_rounds() {
    let mut random = Random(3);
    for hidden in [128usize, 200, 7168] {
        let codes: Vec<u8> = (0..hidden).map(|_| random.bits() as u8).collect();
        let scales = random.f32_row(hidden.div_ceil(128), 2);
        let mut out = vec![bf16::ZERO; hidden];
        dequantize_row(&codes, &scales, &mut out);
        for (i, out) in out.iter().enumerate() {
            let product = Oracle::from_bits(codes[i]).to_f32() * scales[i / 128];
            match product.is_nan() {
                true => assert_eq!(out.to_bits(), 0x7fff),
                false => assert_eq!(out.to_bits(), bf16::from_f32(product).to_bits()),
            }
        }
    }
}

#[test]
fn ue8m0_packs_four_exponents_per_word_least_significant_first() {
    let scales = [
        1.0,
        2.0,
        0.5,
        f32::INFINITY,
        2f32.powi(-22),
        2f32.powi(120),
        1.0,
        1.0,
    ];
    let mut words = [0; 2];
    pack_ue8m0(&scales, &mut words);
    assert_eq!(words, [0xff7e_807fu32 as i32, 0x7f7f_f769]);
    let mut back = [0.0; 8];
    unpack_ue8m0(&words, &mut back);
    assert_eq!(bits(&back), bits(&scales));
    for byte in 0..=254u8 {
        assert_eq!(
            f64::from(ue8m0_to_scale(byte)),
            2f64.powi(i32::from(byte) - 127)
        );
        assert_eq!(ue8m0_from_scale(ue8m0_to_scale(byte)), byte);
    }
    assert_eq!(ue8m0_from_scale(ue8m0_to_scale(255)), 255);
}

//! Element types of tensors.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
    /// IEEE single precision.
    F32 = 3,
    /// FP8 E4M3 without infinities (the `e4m3fn` of the frameworks).
    F8E4M3 = 4,
    /// Unsigned byte; also the elements of `is_token_in_rank` (0 or 1).
    U8 = 5,
    /// Signed byte.
    I8 = 6,
    /// 32-bit signed integer.
    I32 = 7,
    /// 64-bit signed integer.
    I64 = 8,
}

impl DType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F8E4M3 | Self::U8 | Self::I8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F8E4M3 => "f8e4m3",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::I64 => "i64",
        })
    }
}

/// One FP8 E4M3 code (no infinities, NaN is `0x7f` and `0xff`). Conversions are in [`crate::codec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can hold.
pub trait Element: Pod + sealed::Sealed {
    /// Its [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

element! {
    bf16 => Bf16, f16 => F16, f32 => F32, F8E4M3 => F8E4M3, u8 => U8, i8 => I8, i32 => I32, i64 => I64,
}

//! The codec against independent oracles (`half`, `float8`, plain arithmetic in f64), and its code
//! for each instruction set against its plain code, bit for bit.

mod bf16;
mod fp8;
mod levels;
mod logfmt;
mod rows;
mod speed;
mod sum;

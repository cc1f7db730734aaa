//! The slow, obvious definition of dispatch and combine.
//!
//! Every engine is tested against this module, and no engine uses it. It shares no code with the
//! rest of the library: it looks at the inputs of *all* ranks at once and writes down what each rank
//! must end up with. A test that runs as one rank regenerates the inputs of all ranks and asks for
//! its own results only: [`high_throughput::dispatch_to`], [`high_throughput::combine_at`],
//! [`low_latency::dispatch_to`], [`low_latency::combine_at`].
//!
//! Received rows are borrowed from the senders' inputs, not copied: dispatch moves rows and changes
//! nothing in them. Rows of experts' outputs are asked for one at a time by a closure, so that no
//! rank has to hold the outputs of all.
//!
//! Ranks are plain numbers here. `R` ranks, `E` experts of which rank `r` hosts
//! `[r * E/R, (r + 1) * E/R)`, `T` tokens of a rank, `H` hidden, `K` choices of a token. A negative
//! choice is none. A token goes to a rank if at least one of its choices is hosted there.
//!
//! Inputs must be well-formed (ids below `E`, slices of the stated lengths): the functions panic
//! otherwise.

pub mod fp8;
pub mod high_throughput;
pub mod low_latency;

use half::{bf16, f16};

use crate::dtype::Element;

/// A type of values that can be summed: by way of f32.
pub trait Number: Element {
    /// The value as f32, exactly.
    fn to_f32(self) -> f32;

    /// `value` rounded to this type, to nearest, ties to even. A NaN becomes the positive NaN with
    /// all mantissa bits set, as on all engines.
    fn from_f32(value: f32) -> Self;
}

impl Number for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            bf16::from_bits(0x7fff)
        } else {
            bf16::from_f32(value)
        }
    }
}

impl Number for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            f16::from_bits(0x7fff)
        } else {
            f16::from_f32(value)
        }
    }
}

impl Number for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            f32::from_bits(0x7fff_ffff)
        } else {
            value
        }
    }
}

/// Whether expert `id` is one of rank `rank`'s. A negative id is nobody's.
fn hosts(rank: usize, id: i64, experts_per_rank: usize) -> bool {
    id >= 0 && id as usize / experts_per_rank == rank
}

#[cfg(test)]
mod tests;

//! Engines: what moves rows between symmetric memory and the caller's tensors.

pub(crate) mod cpu;

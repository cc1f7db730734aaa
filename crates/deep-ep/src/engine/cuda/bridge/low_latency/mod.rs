//! Low-latency calls of host tensors. Of `[E/R, R*M, H]` only the rows in use are copied.

pub(super) mod combine;
pub(super) mod dispatch;

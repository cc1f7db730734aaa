//! Low-latency calls: the first half sends, the second receives.

pub mod combine;
pub mod dispatch;

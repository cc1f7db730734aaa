//! The C interface `deep_ep.h`.
//!
//! Thin: it turns what C passes (pointers, shapes, strides, a stream) into calls of the library, and
//! errors into status codes and a record per thread. The comments of what is exported become those
//! of the header, `include/deep_ep.h`, which `cargo xtask header` writes; they are in C's words.
//!
//! | module | subject |
//! | --- | --- |
//! | `objects` | what C holds: numbers that look like pointers, so a stale one is an error |
//! | `pointers` | reading and writing through C's pointers; the leaf of most `unsafe` |
//! | `status`, `boundary` | errors; panics stop here |
//! | `tensor`, `communicator`, `buffer`, `layout`, `handle`, `loan` | what calls work with |
//! | `pending` | calls that were begun |
//! | `dispatch`, `combine`, `low_latency`, `masks` | the calls |
//! | `default_buffer`, `all_to_all` | the buffer that nobody passes, and calls on it |
//! | `floats` | floats that may be on a GPU |

// Every exported function has the contract that the header states once: a pointer is NULL or good.
#![allow(clippy::missing_safety_doc)]

pub mod all_to_all;
mod boundary;
pub mod buffer;
pub mod combine;
pub mod communicator;
pub mod default_buffer;
pub mod dispatch;
mod floats;
pub mod handle;
pub mod layout;
pub mod loan;
pub mod low_latency;
pub mod masks;
mod objects;
pub mod pending;
mod pointers;
pub mod status;
pub mod tensor;

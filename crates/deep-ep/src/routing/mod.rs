//! From chosen experts to routes: which token goes to which rank, in which order, and how many.
//!
//! Pure arithmetic, without communication. `R` ranks, `E` experts (rank `r` hosts the block
//! `[r * E/R, (r + 1) * E/R)`), `T` tokens of this rank, `K` choices of each token:
//!
//! ```text
//! topk_idx [T, K] --> Routes: is_token_in_rank [T, R]   who gets which token
//!                             tokens_of_rank(r)         in which order (the slots)
//!                             tokens_per_rank [R], tokens_per_expert [E]
//! ```
//!
//! - A token *goes to* a rank when at least one of its choices is hosted there. It is sent once,
//!   however many of its experts live there.
//! - A negative id is no choice. An id of `E` or more is an error.
//! - Tokens go to a rank in ascending order of their index. The position of a token in that list is
//!   its *slot*; both sides compute it from counts alone.
//! - Low-latency calls deliver one row for each *distinct* expert of a token; see
//!   [`first_choices`] and [`DistinctCounts`].
//!
//! [`Routes`] and [`DistinctCounts`] are made once and rebuilt for every batch; a rebuild allocates
//! only when the batch is larger than any before.

mod distinct;
mod expert_map;
mod indices;
mod lists;
mod localize;
mod routes;
mod sums;

pub use distinct::{DistinctCounts, first_choices};
pub use expert_map::ExpertMap;
pub(crate) use indices::check_ids;
pub use indices::{ExpertIndex, MAX_TOP_K};
pub use localize::localize;
pub use routes::Routes;
pub use sums::{align_counts, align_up, exclusive_prefix_sum, inclusive_prefix_sum};

#[cfg(test)]
mod tests;

//! The threads that copy and sum for one rank.

use std::ops::Range;

use super::copy::{RowUse, Store};
use crate::{
    error::{Error, Result},
    memory::system::second_level_cache,
};

/// At most `num_sms` threads, the calling one when that is enough.
pub(super) struct Workers {
    pool: Option<rayon::ThreadPool>,
    threads: usize,
    /// Bytes of second-level cache of a core.
    cache: u64,
}

impl Workers {
    /// Threads for one of `local_ranks` ranks on this machine, bounded by `num_sms`.
    pub(super) fn new(num_sms: usize, local_ranks: usize) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = num_sms.min(cores / local_ranks).max(1);
        let pool = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|i| format!("deep-ep-{i}"))
                    .build()
                    .map_err(|error| {
                        Error::io("starting worker threads", std::io::Error::other(error))
                    })
            })
            .transpose()?;
        Ok(Self {
            pool,
            threads,
            cache: second_level_cache(),
        })
    }

    /// How to store `bytes` of rows of `row_bytes` in one call.
    pub(super) fn store(&self, row_bytes: usize, bytes: usize, row_use: RowUse) -> Store {
        let thread_bytes = (bytes / self.threads) as u64;
        Store::for_rows(row_bytes, thread_bytes, row_use, self.cache)
    }

    /// Calls `work` for ranges that cover `0..items`, on up to `limit` threads. Ranges are not
    /// smaller than `grain` items unless there are fewer.
    pub(super) fn run(
        &self,
        items: usize,
        grain: usize,
        limit: Option<usize>,
        work: impl Fn(Range<usize>) + Sync,
    ) {
        let threads = limit.unwrap_or(self.threads).clamp(1, self.threads);
        let parts = threads.min(items.div_ceil(grain.max(1))).max(1);
        match &self.pool {
            Some(pool) if parts > 1 => pool.in_place_scope(|scope| {
                for part in 1..parts {
                    let work = &work;
                    scope.spawn(move |_| work(share(items, parts, part)));
                }
                work(share(items, parts, 0));
            }),
            _ => work(0..items),
        }
    }
}

fn share(items: usize, parts: usize, part: usize) -> Range<usize> {
    let at = |part: usize| (items as u128 * part as u128 / parts as u128) as usize;
    at(part)..at(part + 1)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        let workers = Workers::new(64, 1).unwrap();
        for items in [0, 1, 7, 1000] {
            let seen: Vec<_> = (0..items).map(|_| AtomicU32::new(0)).collect();
            workers.run(items, 3, None, |range| {
                range.for_each(|i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

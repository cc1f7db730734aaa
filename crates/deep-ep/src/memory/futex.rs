//! Sleeping on a word of shared memory.
//!
//! The futexes are not process-private: two processes that map the same page of a memfd, wherever
//! they map it, sleep and wake on the same word (futex(2)).

use std::{sync::atomic::AtomicU32, time::Duration};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};

/// Why [`wait`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// Somebody woke this word, or the kernel woke the thread without a reason (signals do). Look
    /// at the word again.
    Woken,
    /// The word did not hold the expected value, so the thread did not sleep.
    Changed,
    /// The time is over.
    TimedOut,
}

/// Sleeps while `word` holds `expected`, for at most `timeout` (`None`: without limit).
///
/// The kernel compares and falls asleep in one step, so a [`wake_all`] that follows a store to
/// `word` is never missed. The comparison orders nothing: the caller loads `word` again, with
/// acquire where data depends on it.
pub(crate) fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Wake {
    // A time too long for the kernel's type (292 billion years) is no limit.
    let timeout = timeout.and_then(|limit| Timespec::try_from(limit).ok());
    match futex::wait(word, Flags::empty(), expected, timeout.as_ref()) {
        Err(Errno::AGAIN) => Wake::Changed,
        Err(Errno::TIMEDOUT) => Wake::TimedOut,
        // EINTR; everything else would be a fault of the address, which a reference excludes.
        Ok(()) | Err(_) => Wake::Woken,
    }
}

/// Wakes every thread that sleeps on `word`, in all processes; says how many.
pub(crate) fn wake_all(word: &AtomicU32) -> usize {
    wake(word, i32::MAX.unsigned_abs())
}

fn wake(word: &AtomicU32, count: u32) -> usize {
    // The only errors of FUTEX_WAKE are about the address, which a reference excludes.
    futex::wake(word, Flags::empty(), count).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::Ordering, thread, time::Instant};

    use super::*;

    #[test]
    fn a_changed_word_does_not_sleep() {
        assert_eq!(wait(&AtomicU32::new(1), 0, None), Wake::Changed);
    }

    #[test]
    fn a_wait_ends_at_its_time() {
        let start = Instant::now();
        let limit = Duration::from_millis(20);
        let word = AtomicU32::new(0);
        while wait(&word, 0, Some(limit.saturating_sub(start.elapsed()))) != Wake::TimedOut {}
        assert!(start.elapsed() >= limit);
        assert_eq!(wait(&word, 0, Some(Duration::ZERO)), Wake::TimedOut);
        assert_eq!(wait(&word, 1, Some(Duration::MAX)), Wake::Changed);
    }

    #[test]
    fn wake_all_wakes_every_sleeper() {
        let word = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while word.load(Ordering::Acquire) == 0 {
                        wait(&word, 0, None);
                    }
                });
            }
            thread::sleep(Duration::from_millis(20));
            word.store(1, Ordering::Release);
            wake_all(&word);
        });
    }
}

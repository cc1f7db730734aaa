//! Giving up a wait because the caller's own thread is asked to stop.
//!
//! A front end whose users press Ctrl-C (an interpreter) must look for it while a call waits. It
//! makes the call inside [`with_check`]; a wait of that thread then asks now and then, and gives up
//! like one whose deadline has passed: the group is aborted, so that no peer waits for this rank.

use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

/// Time between two questions.
const EVERY: Duration = Duration::from_millis(50);

type Check = Rc<dyn Fn() -> bool>;

thread_local! {
    static INSTALLED: RefCell<Option<(Check, Instant)>> = const { RefCell::new(None) };
}

/// Runs `call`. While it waits for peers on this thread, `stop` is asked about 20 times a second;
/// once it says `true`, the wait ends with [`Error::Aborted`](crate::Error::Aborted) by this rank, on
/// all ranks, and the buffer must be made anew.
///
/// ```
/// # use std::rc::Rc;
/// let answer = deep_ep::interrupt::with_check(Rc::new(|| false), || 42);
/// assert_eq!(answer, 42);
/// ```
pub fn with_check<R>(stop: Rc<dyn Fn() -> bool>, call: impl FnOnce() -> R) -> R {
    /// Puts back what was installed before, also when the call panics.
    struct Restore(Option<(Check, Instant)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let before = self.0.take();
            INSTALLED.with(|installed| installed.replace(before));
        }
    }
    let next = Instant::now() + EVERY;
    let _restore = Restore(INSTALLED.with(|installed| installed.replace(Some((stop, next)))));
    call()
}

/// How long a wait that has `left` may sleep before it must ask again.
pub(crate) fn slice(left: Duration) -> Duration {
    let installed = INSTALLED.with(|installed| installed.borrow().is_some());
    if installed { left.min(EVERY) } else { left }
}

/// Whether this thread is asked to stop. Cheap to call often.
pub(crate) fn requested() -> bool {
    let now = Instant::now();
    // The check runs outside the borrow: it may itself make calls.
    let due = INSTALLED.with(|installed| match &mut *installed.borrow_mut() {
        Some((stop, next)) if *next <= now => {
            *next = now + EVERY;
            Some(stop.clone())
        }
        _ => None,
    });
    due.is_some_and(|stop| stop())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn nothing_is_asked_outside_of_a_call() {
        assert!(!requested());
        assert_eq!(slice(Duration::MAX), Duration::MAX);
    }

    #[test]
    fn a_waiting_call_is_asked_now_and_then_and_the_check_is_taken_back() {
        let asked = Rc::new(Cell::new(0));
        let counter = asked.clone();
        let stop = move || {
            counter.set(counter.get() + 1);
            counter.get() == 2
        };
        with_check(Rc::new(stop), || {
            assert!(slice(Duration::MAX) <= EVERY);
            while !requested() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(asked.get(), 2);
        assert!(!requested());
    }
}

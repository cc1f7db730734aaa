//! Waiting without holding the interpreter, and with Ctrl-C.
//!
//! A call runs in the caller's thread, with the interpreter released. While it waits for peers, the
//! library asks 20 times a second whether to stop; the answer runs Python's signal handlers, which
//! works in the main thread only, as everywhere in Python. When a handler raised, the wait gives
//! up, the group is aborted, and what the handler raised is raised here: the caller's memory is no
//! longer in use by then.

use std::{
    ops::Deref,
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{RecvTimeoutError, channel},
    },
    time::Duration,
};

use deep_ep::{Error, interrupt};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::errors::raise;

/// Time between two looks at signals.
const EVERY: Duration = Duration::from_millis(50);

/// A request to all ranks of a group in this process to stop waiting.
pub(crate) type Cancel = Arc<AtomicBool>;

/// A value whose drop may take a while (leaving a group, up to a second), during which others run.
pub(crate) struct Released<T: Send>(Option<T>);

impl<T: Send> Released<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Released<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("only taken when it is dropped")
    }
}

impl<T: Send> Drop for Released<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        // Without an interpreter the value goes with the closure that is not called.
        let _ = Python::try_attach(|py| py.detach(|| drop(value)));
    }
}

/// Runs a call that waits for peers. It must be over when it returns.
pub(crate) fn wait<R: Send>(
    py: Python<'_>,
    cancel: &Cancel,
    call: impl FnOnce() -> deep_ep::Result<R> + Send,
) -> PyResult<R> {
    let raised: Arc<Mutex<Option<PyErr>>> = Arc::default();
    let done = py.detach(|| {
        let (slot, cancel) = (raised.clone(), cancel.clone());
        let stop = move || {
            if cancel.load(Ordering::Relaxed) {
                return true;
            }
            // Without an interpreter to come back to there is nothing to wait for either.
            let handled = Python::try_attach(|py| py.check_signals());
            let Some(handled) = handled else { return true };
            let Err(error) = handled else { return false };
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            true
        };
        interrupt::with_check(Rc::new(stop), call)
    });
    let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
    match raised {
        Some(error) => Err(error),
        None => done.map_err(|error| raise(py, &error)),
    }
}

/// Runs a step of bootstrapping on a thread of its own, which is left alone when a signal handler
/// raises: it ends by its own deadline and touches nothing of the caller's.
pub(crate) fn wait_apart<R: Send + 'static>(
    py: Python<'_>,
    cancel: &Cancel,
    call: impl FnOnce() -> deep_ep::Result<R> + Send + 'static,
) -> PyResult<R> {
    let (sender, mut receiver) = channel();
    std::thread::Builder::new()
        .name("deep-ep-join".into())
        .spawn(move || {
            // Nobody listens any more if the caller was interrupted.
            let _ = sender.send(call());
        })?;
    loop {
        let answer;
        (receiver, answer) = py.detach(move || {
            let answer = receiver.recv_timeout(EVERY);
            (receiver, answer)
        });
        match answer {
            Ok(done) => return done.map_err(|error| raise(py, &error)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the thread that joins ranks ended"));
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(raise(
                py,
                &Error::Bootstrap {
                    stage: "exchange".into(),
                    reason: "another rank of this process failed".into(),
                },
            ));
        }
    }
}

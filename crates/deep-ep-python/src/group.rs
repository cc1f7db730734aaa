//! `Group`: how ranks find each other.

use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering};

use deep_ep::{Communicator, Error, bootstrap::AllGather};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    blocking::{Cancel, Released, wait_apart},
    errors::raise,
};

/// One rank's end of a group of ranks, for programs without `torch.distributed` or MPI.
///
/// `Group.from_env()` is this process among those of a job, as torchrun's variables describe it
/// (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK). `Group.local(n)` are the ends of `n`
/// ranks that are threads of this process; `deep_ep.run_local` makes the threads, too.
#[pyclass(frozen, module = "deep_ep")]
pub(crate) struct Group {
    pub(crate) communicator: Released<Communicator>,
    pub(crate) cancel: Cancel,
    /// The exchange is a Python callable: it must be called by a thread of the interpreter.
    pub(crate) callback: Option<Callback>,
}

/// A Python callable that gathers bytes, and what it raised.
#[derive(Clone)]
pub(crate) struct Callback {
    gather: Arc<Py<PyAny>>,
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl Callback {
    /// What the callable raised since the last time, instead of the error that came of it.
    pub(crate) fn raised(&self) -> Option<PyErr> {
        let mut slot = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

impl AllGather for Callback {
    fn all_gather(&self, mine: &[u8]) -> deep_ep::Result<Vec<Vec<u8>>> {
        let gathered = Python::try_attach(|py| -> PyResult<Vec<Vec<u8>>> {
            let all = self.gather.call1(py, (PyBytes::new(py, mine),))?;
            let items = all.bind(py).try_iter()?;
            items.map(|item| item?.extract()).collect()
        });
        let failed = |reason: String| Error::Bootstrap {
            stage: "exchange".into(),
            reason,
        };
        match gathered {
            Some(Ok(all)) => Ok(all),
            Some(Err(error)) => {
                let reason = format!("the group's all_gather raised: {error}");
                *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Err(failed(reason))
            }
            None => Err(failed("the interpreter has ended".into())),
        }
    }
}

impl Group {
    fn new(communicator: Communicator) -> Self {
        Self {
            communicator: Released::new(communicator),
            cancel: Cancel::default(),
            callback: None,
        }
    }

    /// Runs a step that all ranks take, in a way that its exchange can be interrupted.
    pub(crate) fn run<R: Send + 'static>(
        &self,
        py: Python<'_>,
        step: impl FnOnce(&Communicator) -> deep_ep::Result<R> + Send + 'static,
    ) -> PyResult<R> {
        let communicator = Communicator::clone(&self.communicator);
        let Some(callback) = &self.callback else {
            return wait_apart(py, &self.cancel, move || step(&communicator));
        };
        let done = py.detach(|| step(&communicator));
        done.map_err(|error| callback.raised().unwrap_or_else(|| raise(py, &error)))
    }
}

#[pymethods]
impl Group {
    /// The group of processes that the environment describes. Without WORLD_SIZE a group of one.
    #[staticmethod]
    fn from_env(py: Python<'_>) -> PyResult<Self> {
        wait_apart(py, &Cancel::default(), Communicator::from_env).map(Self::new)
    }

    /// The ends of `n` ranks that are threads of this process, by rank.
    #[staticmethod]
    fn local(py: Python<'_>, n: usize) -> PyResult<Vec<Self>> {
        let ends = Communicator::local(n).map_err(|error| raise(py, &error))?;
        let cancel = Cancel::default();
        let with = |communicator| Self {
            cancel: cancel.clone(),
            ..Self::new(communicator)
        };
        Ok(ends.into_iter().map(with).collect())
    }

    /// A group whose exchange is `all_gather(bytes) -> list of bytes, by rank`.
    #[staticmethod]
    fn from_all_gather(
        py: Python<'_>,
        rank: usize,
        size: usize,
        all_gather: Py<PyAny>,
    ) -> PyResult<Self> {
        let callback = Callback {
            gather: Arc::new(all_gather),
            raised: Arc::default(),
        };
        let transport = Box::new(callback.clone());
        let communicator = Communicator::from_all_gather(rank, size, transport)
            .map_err(|error| raise(py, &error))?;
        Ok(Self {
            callback: Some(callback),
            ..Self::new(communicator)
        })
    }

    /// This rank.
    fn rank(&self) -> usize {
        self.communicator.rank().0
    }

    /// The number of ranks.
    fn size(&self) -> usize {
        self.communicator.size()
    }

    /// This rank's number among those of its host.
    fn local_rank(&self) -> usize {
        self.communicator.local_rank()
    }

    /// Whether all ranks are threads of this process.
    #[getter]
    fn in_process(&self) -> bool {
        self.communicator.in_process()
    }

    /// Sends `data` to all ranks and returns what every rank sent, by rank. Collective.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        data: Vec<u8>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let all = self.run(py, move |communicator| communicator.all_gather(&data))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Returns when every rank has called it. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Communicator::barrier)
    }

    /// Ends the waits of all ranks of this group that are in this process; they raise `Aborted`.
    fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    fn __repr__(&self) -> String {
        format!("<deep_ep.Group rank {} of {}>", self.rank(), self.size())
    }
}

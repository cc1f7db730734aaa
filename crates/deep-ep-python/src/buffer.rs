//! `Buffer`: the object that the Python package's buffer drives.

use std::sync::Arc;

use deep_ep::{BufferConfig, Call, Error, LowLatencyConfig, Rank, Reject, Statistics};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    blocking::{Cancel, Released, wait},
    errors::raise,
    group::Group,
    high_throughput::{self, CombineArguments, DispatchArguments},
    lot::{Dropped, Lot},
    low_latency::{self, PendingLowLatencyCombine, PendingLowLatencyDispatch},
    memory::{Loan, Memory},
    tensor::{Owner, Spec, dtype},
};

/// A buffer of the library. Making one is collective.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct Buffer {
    pub(crate) inner: Released<Arc<deep_ep::Buffer>>,
    pub(crate) cancel: Cancel,
    pub(crate) lot: Lot,
}

/// What a buffer is made with.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    /// Bytes to start with for the high-throughput calls.
    scale_up_bytes: usize,
    /// Landing memory of the low-latency calls; `None`: there are none.
    low_latency_bytes: Option<usize>,
    num_sms: usize,
    enable_shrink: bool,
    /// Ordinal of this rank's GPU, if it has one.
    device: Option<usize>,
}

impl Settings {
    fn config(&self, ranks: usize) -> deep_ep::Result<BufferConfig> {
        let low_latency = self.low_latency_bytes;
        Ok(BufferConfig {
            num_sms: self.num_sms,
            enable_shrink: self.enable_shrink,
            device: self.device,
            low_latency: low_latency
                .map(|bytes| LowLatencyConfig::from_bytes(ranks, bytes))
                .transpose()?,
            ..BufferConfig::from_env()?
        })
    }
}

impl Buffer {
    /// What must be known before a call can be begun: a failure is told to the peers, which would
    /// wait for this rank's call.
    pub(crate) fn prepared<R>(
        &self,
        py: Python<'_>,
        call: Call,
        prepared: deep_ep::Result<R>,
    ) -> PyResult<R> {
        prepared.map_err(|error| {
            if let Error::InvalidArgument(reject) = &error {
                py.detach(|| self.inner.refuse(call, reject));
            }
            raise(py, &error)
        })
    }

    pub(crate) fn run<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&deep_ep::Buffer) -> deep_ep::Result<R> + Send,
    ) -> PyResult<R> {
        wait(py, &self.cancel, || call(&self.inner))
    }
}

#[pymethods]
impl Buffer {
    #[new]
    fn new(py: Python<'_>, group: &Group, settings: Settings) -> PyResult<Self> {
        let inner = group.run(py, move |communicator| {
            // An unusable setting must fail on all ranks, so it becomes one that the library
            // rejects together with them.
            let config = settings.config(communicator.size());
            let (config, failed) = match config {
                Ok(config) => (config, None),
                Err(error) => {
                    let unusable = BufferConfig {
                        num_sms: 0,
                        ..BufferConfig::default()
                    };
                    (unusable, Some(error))
                }
            };
            let buffer = deep_ep::Buffer::new(communicator, config);
            let buffer = failed.map_or(buffer, Err)?;
            // The CPU engine grows for next to nothing when it must, and what starts committed is
            // memory that a laptop lacks.
            if buffer.engine() != "cpu" {
                buffer.reserve(settings.scale_up_bytes)?;
            }
            Ok(Arc::new(buffer))
        })?;
        Ok(Self {
            inner: Released::new(inner),
            cancel: group.cancel.clone(),
            lot: Lot::default(),
        })
    }

    /// `cpu` or `cuda`.
    #[getter]
    fn engine(&self) -> &'static str {
        self.inner.engine()
    }

    /// Tells the peers that this rank cannot make `call`, because `argument` is `value`.
    fn refuse(
        &self,
        py: Python<'_>,
        call: &str,
        argument: String,
        value: String,
        limit: String,
    ) -> PyResult<()> {
        let call = match call {
            "dispatch" => Call::Dispatch,
            "combine" => Call::Combine,
            "low_latency_dispatch" => Call::LowLatencyDispatch,
            "low_latency_combine" => Call::LowLatencyCombine,
            other => return Err(pyo3::exceptions::PyValueError::new_err(other.to_owned())),
        };
        let reject = Reject::new(argument, value, limit);
        py.detach(|| self.inner.refuse(call, &reject));
        Ok(())
    }

    /// `(num_tokens_per_rank, num_tokens_per_node or None, num_tokens_per_expert,
    /// is_token_in_rank)` of choices `[T, K]`. Local.
    fn layout(
        &self,
        py: Python<'_>,
        topk_idx: Spec,
        num_experts: usize,
        stream: usize,
    ) -> PyResult<(Memory, Option<Memory>, Memory, Memory)> {
        high_throughput::layout(self, py, &topk_idx, num_experts, stream)
    }

    /// Dispatches. Without `loan`, `allocate(rows)` provides the outputs. Returns
    /// `(num_recv_tokens_per_expert, the tensors of the handle or None, outputs with loan or None)`.
    fn dispatch(
        &self,
        py: Python<'_>,
        arguments: DispatchArguments,
        allocate: &Bound<'_, PyAny>,
    ) -> PyResult<high_throughput::Arrived> {
        high_throughput::dispatch(self, py, &arguments, allocate)
    }

    /// Combines into outputs that the arguments name.
    fn combine(&self, py: Python<'_>, arguments: CombineArguments) -> PyResult<()> {
        high_throughput::combine(self, py, &arguments)
    }

    /// Sends; the receive half is the returned object's `finish`.
    fn low_latency_dispatch(
        &self,
        py: Python<'_>,
        arguments: low_latency::DispatchArguments,
        keep: Py<PyAny>,
    ) -> PyResult<PendingLowLatencyDispatch> {
        low_latency::dispatch(self, py, &arguments, keep)
    }

    /// Sends; the receive half is the returned object's `finish`.
    fn low_latency_combine(
        &self,
        py: Python<'_>,
        arguments: low_latency::CombineArguments<'_>,
        keep: Py<PyAny>,
    ) -> PyResult<PendingLowLatencyCombine> {
        low_latency::combine(self, py, &arguments, keep)
    }

    /// Memory for the experts' outputs of a handle, for a combine without a copy. Local.
    fn low_latency_combine_buffer(
        &self,
        py: Python<'_>,
        handle: low_latency::HandleArguments,
        keep: Py<PyAny>,
    ) -> PyResult<Loan> {
        let keep: Owner = Arc::new(keep);
        let made = py.detach(|| {
            let made = handle.handle(&keep)?;
            let loan = self
                .inner
                .next_low_latency_combine_buffer(&made, handle.hidden())?;
            Loan::new(loan, &self.lot)
        });
        made.map_err(|error| raise(py, &error))
    }

    /// Raises what went wrong on this rank in calls for which nobody waited, once.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, deep_ep::Buffer::check)
    }

    /// Memory on a GPU that was dropped since the last time. The library uses it again when the object
    /// that this returns goes: work of the caller that uses it must be past by then, or before
    /// everything that the communication stream is still to be given.
    fn dropped(&self) -> Option<Dropped> {
        self.lot.take()
    }

    /// A dense tensor in symmetric memory, where the engine works. Local.
    fn loan(&self, py: Python<'_>, dtype_name: &str, shape: Vec<usize>) -> PyResult<Loan> {
        let made = py.detach(|| {
            let loan = self.inner.device_loan(dtype(dtype_name)?, &shape)?;
            Loan::new(loan, &self.lot)
        });
        made.map_err(|error| raise(py, &error))
    }

    /// Waits for all ranks; with `enable_shrink` masks those that do not come. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, deep_ep::Buffer::barrier)
    }

    /// Grows this rank's symmetric memory to at least `bytes`. Local.
    fn reserve(&self, py: Python<'_>, bytes: usize) -> PyResult<()> {
        self.run(py, |buffer| buffer.reserve(bytes))
    }

    /// Masks a rank, or takes it back.
    fn set_mask(&self, py: Python<'_>, rank: usize, masked: bool) -> PyResult<()> {
        let done = self.inner.set_mask(Rank(rank), masked);
        done.map_err(|error| raise(py, &error))
    }

    /// Whether each rank is masked.
    fn masks(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        self.inner.masks().map_err(|error| raise(py, &error))
    }

    /// Takes all masks back.
    fn clear_masks(&self, py: Python<'_>) -> PyResult<()> {
        let done = self.inner.clear_masks();
        done.map_err(|error| raise(py, &error))
    }

    /// Bytes copied and memory used so far on this rank.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Statistics {
            row_bytes_copied,
            metadata_bytes_copied,
            bytes_summed,
            wire_bytes,
            calls,
            memory,
            ..
        } = self.inner.statistics();
        let values = PyDict::new(py);
        for (name, value) in [
            ("row_bytes_copied", row_bytes_copied),
            ("metadata_bytes_copied", metadata_bytes_copied),
            ("bytes_summed", bytes_summed),
            ("wire_bytes", wire_bytes),
            ("calls", calls),
            ("memory_committed", memory.committed),
            ("memory_in_use", memory.in_use),
            ("memory_peak", memory.peak),
        ] {
            values.set_item(name, value)?;
        }
        Ok(values)
    }
}

//! Low-latency calls, in two halves.

use std::sync::{Arc, Mutex, PoisonError};

use deep_ep::{
    Call, CombineRows, CombineWire, DType, Error, LowLatencyCombineInput, LowLatencyConfig,
    LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyHandle, OwnedTensor, Result,
    RowFormat, Stream, Tensor, codec::ScaleFormat,
};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::{
    blocking::{Cancel, wait},
    buffer::Buffer,
    errors::raise,
    lot::Lot,
    memory::{Loan, Memory, View},
    tensor::{Owner, Spec, write_optional},
};

/// Bytes of landing memory per rank for low-latency calls of these sizes.
#[pyfunction]
pub(crate) fn low_latency_bytes(
    py: Python<'_>,
    max_tokens_per_rank: usize,
    hidden: usize,
    num_ranks: usize,
    num_experts: usize,
) -> PyResult<usize> {
    let config = LowLatencyConfig {
        max_tokens_per_rank,
        hidden,
        num_experts,
        exact_top_k: None,
    };
    config.bytes(num_ranks).map_err(|error| raise(py, &error))
}

/// The tensors and numbers of a handle: `src_info`, `layout_range`, `M`, `H`, `E`.
#[derive(FromPyObject)]
pub(crate) struct HandleArguments(Spec, Spec, usize, usize, usize);

impl HandleArguments {
    /// The handle. A GPU's consists of the tensors, which `keep` keeps.
    pub(crate) fn handle(&self, keep: &Owner) -> Result<LowLatencyHandle> {
        const NAMES: [&str; 2] = ["handle (src_info)", "handle (layout_range)"];
        let Self(info, layout, max_tokens, hidden, num_experts) = self;
        // SAFETY: Python keeps the tensors while it passes them, which is longer than this call, and
        // `keep` holds them.
        unsafe {
            if info.on_device() {
                let info = info.owned(NAMES[0], keep.clone())?;
                let layout = layout.owned(NAMES[1], keep.clone())?;
                return LowLatencyHandle::from_device_parts(info, layout, *max_tokens, *hidden);
            }
            let (info, layout) = (info.read(NAMES[0])?, layout.read(NAMES[1])?);
            LowLatencyHandle::from_parts(info, layout, *max_tokens, *hidden, *num_experts)
        }
    }

    pub(crate) fn hidden(&self) -> usize {
        self.3
    }
}

/// Arguments of a dispatch.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DispatchArguments {
    x: Spec,
    topk_idx: Spec,
    max_tokens_per_rank: usize,
    num_experts: usize,
    recv_stats: Option<Spec>,
    wait_stats: Option<Spec>,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    /// Whether the call is finished before anything else comes.
    at_once: bool,
    stream: usize,
}

impl DispatchArguments {
    fn format(&self) -> RowFormat {
        match (self.use_fp8, self.use_ue8m0, self.round_scale) {
            (false, ..) => RowFormat::Bf16,
            (true, true, _) => RowFormat::Fp8(ScaleFormat::Ue8m0),
            (true, false, true) => RowFormat::Fp8(ScaleFormat::PowerOfTwo),
            (true, false, false) => RowFormat::Fp8(ScaleFormat::F32),
        }
    }

    /// The input.
    ///
    /// # Safety
    /// The tensors that Python passed must outlive `'a`; statistics are used by nobody else.
    unsafe fn input<'a>(&self) -> Result<LowLatencyDispatchInput<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            let (x, topk_idx) = (self.x.read("x")?, self.topk_idx.read("topk_idx")?);
            let (max, experts) = (self.max_tokens_per_rank, self.num_experts);
            let stats = "cumulative_local_expert_recv_stats";
            let wait = "dispatch_wait_recv_cost_stats";
            Ok(LowLatencyDispatchInput {
                format: self.format(),
                recv_stats: write_optional(&self.recv_stats, stats)?,
                wait_stats: write_optional(&self.wait_stats, wait)?,
                at_once: self.at_once,
                stream: Stream::from_raw(self.stream),
                ..LowLatencyDispatchInput::new(x, topk_idx, max, experts)
            })
        }
    }
}

/// A pending call and what it borrows, which is dropped after it.
struct Held<P> {
    pending: P,
    _handle: Option<Arc<LowLatencyHandle>>,
    _loan: Option<Arc<deep_ep::Loan>>,
    /// The caller's tensors.
    _keep: Py<PyAny>,
}

/// A pending call that is taken once.
struct Once<P> {
    held: Mutex<Option<Held<P>>>,
    cancel: Cancel,
    lot: Lot,
}

impl<P: Send> Once<P> {
    fn new(buffer: &Buffer, held: Held<P>) -> Self {
        Self {
            held: Mutex::new(Some(held)),
            cancel: buffer.cancel.clone(),
            lot: buffer.lot.clone(),
        }
    }

    /// Finishes the call, with the interpreter released.
    fn finish<R: Send>(
        &self,
        py: Python<'_>,
        finish: impl FnOnce(P) -> Result<R> + Send,
    ) -> PyResult<R> {
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(Held {
            pending,
            _handle,
            _loan,
            _keep,
        }) = held
        else {
            return Err(PyRuntimeError::new_err(
                "this call was received before: its hook may be called once",
            ));
        };
        wait(py, &self.cancel, move || finish(pending))
    }
}

/// A dispatch whose send is done.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct PendingLowLatencyDispatch(Once<deep_ep::PendingLowLatencyDispatch<'static>>);

#[pymethods]
impl PendingLowLatencyDispatch {
    /// Receives into `x` and `scales`; returns `(recv_count, src_info, layout_range)`.
    fn finish(&self, py: Python<'_>, x: Spec, scales: Option<Spec>) -> PyResult<Tables> {
        let (counts, handle) = self.0.finish(py, move |pending| {
            // SAFETY: Python keeps the tensors, which it has just made, during the call.
            let out = unsafe {
                LowLatencyDispatchOutput {
                    x: x.write("recv_x")?,
                    scales: write_optional(&scales, "recv_x[1] (scales)")?,
                }
            };
            pending.finish_into(out)
        })?;
        Ok(memory_of(counts, handle, &self.0.lot))
    }

    /// `(recv_count, src_info, layout_range)` before `finish`, which fills them; `None` if they are
    /// not known before.
    fn tables(&self, py: Python<'_>) -> PyResult<Option<Tables>> {
        let made = py.detach(|| {
            let mut held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
            let made = held.as_mut().map(|held| held.pending.tables());
            made.transpose()
        });
        let made = made.map_err(|error| raise(py, &error))?.flatten();
        Ok(made.map(|(counts, handle)| memory_of(counts, handle, &self.0.lot)))
    }
}

/// `recv_count`, `src_info` and `layout_range` for Python.
type Tables = (Memory, Memory, Memory);

fn memory_of(counts: OwnedTensor, handle: LowLatencyHandle, lot: &Lot) -> Tables {
    let made = Arc::new((counts, handle));
    let (counts, handle) = &*made;
    let count = View::of(&counts.as_tensor());
    let owner = lot.owner(count.device, made.clone());
    let memory = |view| Memory::new(view, owner.clone());
    let tables = [handle.src_info(), handle.layout_range()];
    let [info, layout] = tables.map(|tensor| memory(View::of(&tensor)));
    (memory(count), info, layout)
}

pub(crate) fn dispatch(
    buffer: &Buffer,
    py: Python<'_>,
    arguments: &DispatchArguments,
    keep: Py<PyAny>,
) -> PyResult<PendingLowLatencyDispatch> {
    // SAFETY: `keep` holds the tensors, and is held as long as the pending call.
    let prepared = unsafe { arguments.input() };
    let input = buffer.prepared(py, Call::LowLatencyDispatch, prepared)?;
    let pending = buffer.run(py, |buffer| buffer.low_latency_dispatch(input))?;
    let held = Held {
        pending,
        _handle: None,
        _loan: None,
        _keep: keep,
    };
    Ok(PendingLowLatencyDispatch(Once::new(buffer, held)))
}

/// Arguments of a combine.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CombineArguments<'py> {
    x: Spec,
    /// What `x` is in, for a combine without a copy.
    loan: Option<Bound<'py, Loan>>,
    topk_idx: Spec,
    topk_weights: Spec,
    handle: HandleArguments,
    use_logfmt: bool,
    /// Whether the call is finished before anything else comes.
    at_once: bool,
    wait_stats: Option<Spec>,
    /// Where the result will be wanted, looked at before anything is sent.
    out: Spec,
    stream: usize,
}

impl CombineArguments<'_> {
    /// A result that does not fit would be found when it is too late for the peers.
    fn check_out(&self, x: &Tensor<'_>) -> Result<()> {
        // SAFETY: Python keeps the tensor during this call, and nothing is written to it here.
        let (out, idx) = unsafe { (self.out.write("out")?, self.topk_idx.read("topk_idx")?) };
        let (Some(&tokens), Some(&hidden)) = (idx.shape().first(), x.shape().last()) else {
            return Ok(());
        };
        let dense = out.strides().last() == Some(&1) || hidden == 1;
        let fits = out.dtype() == DType::Bf16 && out.shape() == [tokens, hidden] && dense;
        match fits && out.device() == x.device() {
            true => Ok(()),
            false => Err(Error::invalid(
                "out",
                format!("{out:?}"),
                format!("must be bf16 [{tokens}, {hidden}] with dense rows, where x is"),
            )),
        }
    }

    /// The input.
    ///
    /// # Safety
    /// The tensors that Python passed, `handle` and `loan` must outlive `'a`; statistics are used
    /// by nobody else.
    unsafe fn input<'a>(
        &self,
        handle: &'a LowLatencyHandle,
        loan: Option<&'a deep_ep::Loan>,
    ) -> Result<LowLatencyCombineInput<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            let x = match loan {
                Some(loan) => CombineRows::Loan(loan),
                None => CombineRows::Caller(self.x.read("x")?),
            };
            self.check_out(&x.as_tensor())?;
            let topk_idx = self.topk_idx.read("topk_idx")?;
            let topk_weights = self.topk_weights.read("topk_weights")?;
            let stats = "combine_wait_recv_cost_stats";
            let wire = if self.use_logfmt {
                CombineWire::LogFmt
            } else {
                CombineWire::Bf16
            };
            Ok(LowLatencyCombineInput {
                wire,
                wait_stats: write_optional(&self.wait_stats, stats)?,
                at_once: self.at_once,
                stream: Stream::from_raw(self.stream),
                ..LowLatencyCombineInput::new(x, topk_idx, topk_weights, handle)
            })
        }
    }
}

/// A combine whose send is done.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct PendingLowLatencyCombine(Once<deep_ep::PendingLowLatencyCombine<'static>>);

#[pymethods]
impl PendingLowLatencyCombine {
    /// Receives into `out`.
    fn finish(&self, py: Python<'_>, out: Spec) -> PyResult<()> {
        self.0.finish(py, move |pending| {
            // SAFETY: Python keeps the tensor during the call, and nobody else uses it.
            pending.finish_into(unsafe { out.write("out")? })
        })
    }
}

pub(crate) fn combine(
    buffer: &Buffer,
    py: Python<'_>,
    arguments: &CombineArguments<'_>,
    keep: Py<PyAny>,
) -> PyResult<PendingLowLatencyCombine> {
    let owner: Owner = Arc::new(keep.clone_ref(py));
    let made = py.detach({
        let handle = &arguments.handle;
        || handle.handle(&owner)
    });
    let handle = Arc::new(buffer.prepared(py, Call::LowLatencyCombine, made)?);
    let loan = arguments.loan.as_ref().map(|loan| loan.get().loan.clone());
    // SAFETY: `Held` keeps handle, loan and tensors until after the pending call, and neither moves
    // inside its `Arc`.
    let prepared = unsafe {
        let handle: &'static LowLatencyHandle = &*Arc::as_ptr(&handle);
        let loan: Option<&'static deep_ep::Loan> = loan.as_ref().map(|loan| &*Arc::as_ptr(loan));
        arguments.input(handle, loan)
    };
    let input = buffer.prepared(py, Call::LowLatencyCombine, prepared)?;
    let pending = buffer.run(py, |buffer| buffer.low_latency_combine(input))?;
    let held = Held {
        pending,
        _handle: Some(handle),
        _loan: loan,
        _keep: keep,
    };
    Ok(PendingLowLatencyCombine(Once::new(buffer, held)))
}

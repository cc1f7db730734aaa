//! High-throughput calls.

use std::sync::Arc;

use deep_ep::{
    Call, CombineInput, CombineOutput, DeviceLayout, DeviceRoutes, DispatchHandle, DispatchInput,
    DispatchOutput, Dispatched, Landing, Layout, OwnedTensor, Rank, ReceivedCounts, Result, Routes,
    Stream, TopK,
};
use pyo3::prelude::*;

use crate::{
    buffer::Buffer,
    errors::raise,
    lot::Lot,
    memory::{Loan, Memory, View},
    tensor::{Owner, Spec, read_optional, write_optional},
};

/// The tensors of a handle, in the order of the tuple.
#[derive(FromPyObject)]
pub(crate) struct HandleTensors(Spec, Spec, Spec, Spec, Spec, Spec);

impl HandleTensors {
    /// The handle. On the host it is made of what three of the tensors say; a GPU's consists of the
    /// tensors, which `keep` keeps.
    fn handle(&self, rank: Rank, keep: &Owner) -> Result<DispatchHandle> {
        let Self(prefix, channels, recv_channels, source, routes, head) = self;
        // SAFETY: Python keeps the tensors while it passes them, which is longer than this call, and
        // `keep` holds them.
        unsafe {
            if !routes.on_device() {
                return DispatchHandle::from_parts(
                    rank,
                    prefix.read("handle (rank_prefix_matrix)")?,
                    source.read("handle (recv_src_idx)")?,
                    routes.read("handle (is_token_in_rank)")?,
                );
            }
            let owned = |spec: &Spec, name| spec.owned(name, keep.clone());
            DispatchHandle::from_device_parts(DeviceRoutes {
                rank,
                rank_prefix_matrix: owned(prefix, "handle (rank_prefix_matrix)")?,
                channel_prefix_matrix: owned(channels, "handle (channel_prefix_matrix)")?,
                recv_channel_prefix_matrix: owned(
                    recv_channels,
                    "handle (recv_channel_prefix_matrix)",
                )?,
                recv_src_idx: owned(source, "handle (recv_src_idx)")?,
                is_token_in_rank: owned(routes, "handle (is_token_in_rank)")?,
                send_head: owned(head, "handle (send_head)")?,
                remote_rows: None,
            })
        }
    }
}

/// Arguments of a dispatch. Exactly one of `layout` and `handle` is given.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DispatchArguments {
    x: Spec,
    scales: Option<Spec>,
    /// `is_token_in_rank`, `num_tokens_per_rank`, `num_tokens_per_expert`.
    layout: Option<(Spec, Spec, Spec)>,
    handle: Option<HandleTensors>,
    topk_idx: Option<Spec>,
    topk_weights: Option<Spec>,
    expert_alignment: usize,
    num_worst_tokens: Option<usize>,
    num_sms: usize,
    /// Whether outputs are memory of the library: rows are then written once, at their final place.
    loan: bool,
    /// Holds the tensors.
    keep: Py<PyAny>,
    stream: usize,
}

/// Where rows go, owned.
enum Where {
    Layout(Box<Layout>),
    Handle(DispatchHandle),
}

impl DispatchArguments {
    fn routes(&self, rank: Rank, keep: &Owner) -> Result<Where> {
        if let Some(handle) = &self.handle {
            return Ok(Where::Handle(handle.handle(rank, keep)?));
        }
        let Some((routes, ranks, experts)) = &self.layout else {
            return Err(deep_ep::Error::invalid(
                "is_token_in_rank",
                "None",
                "must be given when there is no handle",
            ));
        };
        // SAFETY: as in `HandleTensors::handle`.
        let layout = unsafe {
            if routes.on_device() {
                let owned = |spec: &Spec, name| spec.owned(name, keep.clone());
                Layout::from_device_parts(DeviceLayout {
                    num_tokens_per_rank: owned(ranks, "num_tokens_per_rank")?,
                    num_tokens_per_expert: owned(experts, "num_tokens_per_expert")?,
                    is_token_in_rank: owned(routes, "is_token_in_rank")?,
                })?
            } else {
                Layout::from_parts(
                    routes.read("is_token_in_rank")?,
                    ranks.read("num_tokens_per_rank")?,
                    experts.read("num_tokens_per_expert")?,
                )?
            }
        };
        Ok(Where::Layout(Box::new(layout)))
    }

    /// The input.
    ///
    /// # Safety
    /// The tensors that Python passed must outlive `'a`.
    unsafe fn input<'a>(&self, routes: &'a Where) -> Result<DispatchInput<'a>> {
        // SAFETY: the caller's promise.
        let (x, scales, idx, weights) = unsafe {
            (
                self.x.read("x")?,
                read_optional(&self.scales, "x[1] (scales)")?,
                read_optional(&self.topk_idx, "topk_idx")?,
                read_optional(&self.topk_weights, "topk_weights")?,
            )
        };
        let topk = idx.map(|idx| TopK { idx, weights });
        let routes = match routes {
            Where::Layout(layout) => Routes::Layout { layout, topk },
            Where::Handle(handle) => Routes::Handle(handle),
        };
        Ok(DispatchInput {
            scales,
            expert_alignment: self.expert_alignment,
            num_worst_tokens: self.num_worst_tokens,
            landing: if self.loan {
                Landing::Loan
            } else {
                Landing::Caller
            },
            num_sms: Some(self.num_sms),
            // SAFETY: Python holds the stream while the call runs.
            stream: unsafe { Stream::from_raw(self.stream) },
            ..DispatchInput::new(x, routes)
        })
    }
}

/// Outputs of a dispatch, as `allocate` returns them: `recv_x`, its scales, `recv_topk_idx`,
/// `recv_topk_weights`.
#[derive(FromPyObject)]
struct Outputs(Spec, Option<Spec>, Option<Spec>, Option<Spec>);

pub(crate) fn layout(
    buffer: &Buffer,
    py: Python<'_>,
    topk_idx: &Spec,
    num_experts: usize,
    stream: usize,
) -> PyResult<(Memory, Option<Memory>, Memory, Memory)> {
    let inner = &buffer.inner;
    let made = py.detach(|| {
        // SAFETY: Python keeps tensor and stream during the call.
        let (topk_idx, stream) = unsafe { (topk_idx.read("topk_idx")?, Stream::from_raw(stream)) };
        inner.dispatch_layout_on(topk_idx, num_experts, stream)
    });
    let layout = Arc::new(made.map_err(|error| raise(py, &error))?);
    let routes = layout.is_token_in_rank();
    let owner = buffer.lot.owner(View::of(&routes).device, layout.clone());
    let memory = |tensor| Memory::new(View::of(&tensor), owner.clone());
    Ok((
        memory(layout.num_tokens_per_rank()),
        layout.num_tokens_per_node().map(memory),
        memory(layout.num_tokens_per_expert()),
        memory(routes),
    ))
}

/// What a dispatch returns to Python: rows of each local expert; the tensors of the handle, unless
/// one was given; and the outputs, if they are memory of the library.
pub(crate) type Arrived = (Vec<usize>, Option<Vec<Memory>>, Option<Vec<Option<Memory>>>);

pub(crate) fn dispatch(
    buffer: &Buffer,
    py: Python<'_>,
    arguments: &DispatchArguments,
    allocate: &Bound<'_, PyAny>,
) -> PyResult<Arrived> {
    let inner = &buffer.inner;
    let keep: Owner = Arc::new(arguments.keep.clone_ref(py));
    let prepared = py.detach(|| arguments.routes(inner.rank(), &keep));
    let routes = buffer.prepared(py, Call::Dispatch, prepared)?;
    // SAFETY: Python keeps the tensors until this function returns, and the call is over by then.
    let prepared = unsafe { arguments.input(&routes) };
    let input = buffer.prepared(py, Call::Dispatch, prepared)?;
    let (counts, handle, outputs) = if arguments.loan {
        let lot = &buffer.lot;
        let lent = buffer.run(py, |buffer| lend(buffer.dispatch(input)?.finish()?, lot))?;
        (lent.0, lent.1, Some(lent.2))
    } else {
        let (counts, handle) = dispatch_into(buffer, py, input, allocate)?;
        (counts, handle, None)
    };
    let new = arguments.handle.is_none();
    let handle = new.then(|| parts(&handle, &buffer.lot));
    Ok((counts.tokens_per_expert, handle, outputs))
}

/// Dispatches into memory that `allocate(rows)` provides.
fn dispatch_into(
    buffer: &Buffer,
    py: Python<'_>,
    input: DispatchInput<'_>,
    allocate: &Bound<'_, PyAny>,
) -> PyResult<(ReceivedCounts, DispatchHandle)> {
    let (pending, rows) = buffer.run(py, |buffer| {
        let mut pending = buffer.dispatch(input)?;
        let rows = pending.counts()?.output_rows;
        Ok((pending, rows))
    })?;
    // Dropping the pending call when this fails tells the peers.
    let outputs: Outputs = allocate.call1((rows,))?.extract()?;
    buffer.run(py, move |_| {
        // SAFETY: as for the inputs; nobody else knows the new tensors.
        let outputs = unsafe {
            DispatchOutput {
                x: outputs.0.write("recv_x")?,
                scales: write_optional(&outputs.1, "recv_x[1] (scales)")?,
                topk_idx: write_optional(&outputs.2, "recv_topk_idx")?,
                topk_weights: write_optional(&outputs.3, "recv_topk_weights")?,
            }
        };
        pending.finish_into(outputs)
    })
}

/// The outputs of a dispatch as memory of the library.
fn lend(
    dispatched: Dispatched,
    lot: &Lot,
) -> Result<(ReceivedCounts, DispatchHandle, Vec<Option<Memory>>)> {
    let owned = |tensor: OwnedTensor| {
        let owner = Arc::new(tensor);
        Memory::new(View::of(&owner.as_tensor()), owner)
    };
    let outputs = vec![
        Some(Loan::new(dispatched.x, lot)?.memory().into_plain()),
        dispatched.scales.map(owned),
        dispatched.topk_idx.map(owned),
        dispatched.topk_weights.map(owned),
    ];
    Ok((dispatched.counts, dispatched.handle, outputs))
}

/// The tensors that a handle consists of, in the order of the tuple.
fn parts(handle: &DispatchHandle, lot: &Lot) -> Vec<Memory> {
    let routes = View::of(&handle.is_token_in_rank());
    let owner = lot.owner(routes.device, Arc::new(handle.clone()));
    let memory = |tensor| Memory::new(View::of(&tensor), owner.clone());
    vec![
        memory(handle.rank_prefix_matrix()),
        memory(handle.channel_prefix_matrix()),
        memory(handle.recv_channel_prefix_matrix()),
        memory(handle.recv_src_idx()),
        Memory::new(routes, owner.clone()),
        memory(handle.send_head()),
    ]
}

/// Arguments of a combine, outputs included.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CombineArguments {
    x: Spec,
    handle: HandleTensors,
    topk_weights: Option<Spec>,
    bias: (Option<Spec>, Option<Spec>),
    combined_x: Spec,
    combined_topk_weights: Option<Spec>,
    num_sms: usize,
    /// Holds the tensors.
    keep: Py<PyAny>,
    stream: usize,
}

impl CombineArguments {
    /// The input.
    ///
    /// # Safety
    /// The tensors that Python passed must outlive `'a`.
    unsafe fn input<'a>(&self, handle: &'a DispatchHandle) -> Result<CombineInput<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(CombineInput {
                topk_weights: read_optional(&self.topk_weights, "topk_weights")?,
                bias: [
                    read_optional(&self.bias.0, "bias")?,
                    read_optional(&self.bias.1, "bias")?,
                ],
                num_sms: Some(self.num_sms),
                stream: Stream::from_raw(self.stream),
                ..CombineInput::new(self.x.read("x")?, handle)
            })
        }
    }

    /// The outputs.
    ///
    /// # Safety
    /// The tensors that Python passed must outlive `'a`, and nobody else may use them.
    unsafe fn outputs<'a>(&self) -> Result<CombineOutput<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(CombineOutput {
                x: self.combined_x.write("combined_x")?,
                topk_weights: write_optional(&self.combined_topk_weights, "combined_topk_weights")?,
            })
        }
    }
}

pub(crate) fn combine(
    buffer: &Buffer,
    py: Python<'_>,
    arguments: &CombineArguments,
) -> PyResult<()> {
    let inner = &buffer.inner;
    let keep: Owner = Arc::new(arguments.keep.clone_ref(py));
    let prepared = py.detach(|| arguments.handle.handle(inner.rank(), &keep));
    let handle = buffer.prepared(py, Call::Combine, prepared)?;
    // SAFETY: Python keeps the tensors until this function returns, and the call is over by then;
    // it has just made the outputs.
    let prepared = unsafe {
        arguments
            .input(&handle)
            .and_then(|input| Ok((input, arguments.outputs()?)))
    };
    let (input, outputs) = buffer.prepared(py, Call::Combine, prepared)?;
    buffer.run(py, |buffer| buffer.combine(input)?.finish_into(outputs))
}

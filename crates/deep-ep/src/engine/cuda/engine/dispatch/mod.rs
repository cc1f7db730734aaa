//! High-throughput dispatch: launches, and what the caller gets.

mod counts;
mod handle;
mod plan;

use std::sync::Arc;

pub(super) use self::plan::MAX_TOP_K;
use self::{
    handle::HandleParts,
    plan::{Sms, blank, describe, launch, prepare, purpose},
};
use super::{
    core::{Core, Half, OnStream, Piece},
    landing::{CudaLoan, LandingLayout, device_tensor},
    params::{DispatchParams, LANDING_UNIT, Terms, phase},
    progress::{Discard, Open, Progress},
};
use crate::{
    buffer::{
        DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Loan, ReceivedCounts,
        Routes, TopK, check_dispatch_output,
    },
    dtype::DType,
    engine::{DispatchCall, Operation},
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::{Device, OwnedTensor, Tensor},
};

/// Choices that travel with rows.
fn choices<'a>(input: &DispatchInput<'a>) -> Option<TopK<'a>> {
    match input.routes {
        Routes::TopK { topk, .. } => Some(topk),
        Routes::Layout { topk, .. } => topk,
        Routes::Handle(_) => None,
    }
}

/// A dispatch that was launched.
pub(super) struct InFlight {
    core: Arc<Core>,
    number: u64,
    on: OnStream,
    params: DispatchParams,
    device: Device,
    landing: Arc<Piece>,
    layout: LandingLayout,
    handle: Option<HandleParts>,
    /// Source tokens of worst-case outputs along a given handle.
    padding: Option<Arc<Piece>>,
    counts: Option<ReceivedCounts>,
    expert_alignment: usize,
    worst: Option<usize>,
    sms: Sms,
    /// Both halves are one launch.
    fused: bool,
    progress: Arc<Progress>,
}

/// Launches what can be launched before the outputs are known.
pub(super) fn begin(core: &Arc<Core>, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>> {
    let on = core.begin(input.stream)?;
    if on.recorded && input.num_worst_tokens.is_none() {
        return Err(Error::invalid(
            "num_worst_tokens",
            "None",
            "must be given while a graph is recorded: nobody can wait for counts then",
        ));
    }
    // What goes wrong on this rank alone is told to the others, which would wait for it.
    let mut call = InFlight::new(core, on, input).inspect_err(|error| tell(core, error))?;
    call.launch_send()?;
    Ok(Box::new(call))
}

/// Rejects a call that this rank cannot make.
fn tell(core: &Arc<Core>, error: &Error) {
    if let Some(text) = core.reason(error)
        && let Err(other) = reject(core, text)
    {
        tracing::warn!(%other, "a reject could not be sent");
    }
}

/// Enqueues the receiving half of a call that was given up: it waits for the rows and lets them go.
pub(super) fn discard(on: &OnStream, mut params: DispatchParams) -> Result<()> {
    params.group.state = on.core.state(Half::Receive);
    params.group.advance = 1;
    params.phases = phase::RECEIVE;
    params.discard = 1;
    launch(&on.core, on, &params, 1, None)?;
    on.join()?;
    on.end()
}

/// Takes part in a call only to reject it.
pub(super) fn reject(core: &Arc<Core>, text: u64) -> Result<()> {
    core.skip_number();
    let on = core.begin_aside()?;
    let mut params = blank(core.group(Operation::Dispatch, Half::Send, true));
    params.group.second_state = core.state(Half::Receive);
    params.experts = core.ranks as u32;
    params.reject_text = text;
    params.phases = phase::REJECT;
    match &core.split {
        None => launch(core, &on, &params, 1, None)?,
        Some(split) => {
            // The announcement, then a look at the others'.
            params.group.advance = 0;
            params.phases = phase::REJECT | phase::COUNT;
            launch(core, &on, &params, 1, None)?;
            split.meet(&on.stream)?;
            params.group.advance = 1;
            params.phases = phase::REJECT;
            launch(core, &on, &params, 1, None)?;
            split.meet(&on.stream)?;
        }
    }
    on.end()
}

impl InFlight {
    fn new(core: &Arc<Core>, on: OnStream, input: &DispatchInput<'_>) -> Result<Self> {
        let recorded = on.recorded;
        let fused = input.landing == Landing::Loan;
        let sms = Sms::of(core.sms(input.num_sms), fused);
        let mut params = describe(core, input, sms.send)?;
        let rows = input
            .num_worst_tokens
            .unwrap_or_else(|| core.expected_rows(input.x.shape()[0]));
        let layout = LandingLayout::of(&params);
        let landing = core.block(layout.bytes(rows), purpose(input.landing))?;
        let (mut handle, mut padding) = (None, None);
        if !matches!(input.routes, Routes::Handle(_)) {
            let parts = HandleParts::new(core, input.x.shape()[0], rows)?;
            parts.describe(&mut params);
            handle = Some(parts);
        } else if input.num_worst_tokens.is_some() {
            let block = core.block(rows as u64 * 4, Purpose::Metadata)?;
            params.src_idx = block.address();
            padding = Some(Arc::new(block));
        }
        if recorded {
            // Whatever the caller keeps, the graph writes there whenever it is replayed.
            landing.keep();
            handle.iter().for_each(|parts| parts.block.keep());
            padding.iter().for_each(|block| block.keep());
        }
        // Whatever a launch needs besides memory is here before anything is sent.
        let sending = DispatchParams {
            phases: phase::COUNT | phase::MOVE,
            copy_rows: u32::from(!fused),
            ..params
        };
        prepare(core, &sending, sms.send)?;
        prepare(core, &params, sms.receive)?;
        let number = core.number();
        if input.num_worst_tokens.is_none() {
            let terms = Terms::of_word(params.terms);
            let attempt = (number & 0x1ff) as u16;
            params.terms = Terms { attempt, ..terms }.word();
        }
        let mut this = Self {
            core: Arc::clone(core),
            number,
            on,
            params,
            device: input.x.device(),
            landing: Arc::new(landing),
            layout,
            handle,
            padding,
            counts: None,
            expert_alignment: input.expert_alignment,
            worst: input.num_worst_tokens,
            sms,
            fused,
            progress: Arc::default(),
        };
        this.place(rows);
        Ok(this)
    }

    /// Tells the kernels where rows land, and where they stay if they are not copied out.
    fn place(&mut self, rows: usize) {
        self.params.landing = (self.landing.offset() / LANDING_UNIT) as u32;
        self.params.capacity = rows as u32;
        self.params.out_rows = rows as u32;
        self.params.copy_rows = u32::from(!self.fused);
        let base = self.landing.address();
        let parts = self.layout.parts(rows);
        self.params.out_x = base + parts.rows;
        self.params.out_stride = u64::from(self.params.row_bytes);
        let part = |travels: bool, at: u64| if travels { base + at } else { 0 };
        self.params.out_topk = part(self.layout.topk_bytes > 0, parts.topk);
        self.params.out_weights = part(self.layout.weighs, parts.weights);
        self.params.out_scales = part(self.layout.scale_bytes > 0, parts.scales);
    }

    fn launch_send(&mut self) -> Result<()> {
        let mut params = self.params;
        if self.worst.is_none() {
            params.ticket = self.core.ticket();
            self.params.ticket = params.ticket;
            params.result = self.core.results.address();
        }
        match &self.core.split {
            None => {
                params.phases = phase::COUNT | phase::MOVE;
                if self.fused {
                    params.phases |= phase::RECEIVE;
                    params.group.second_state = self.core.state(Half::Receive);
                }
                // The receiving half comes on the caller's stream, behind what the caller does with its
                // outputs before.
                let aside = if self.beside() {
                    Some(self.on.aside()?)
                } else {
                    None
                };
                launch(&self.core, &self.on, &params, self.sms.send, aside)?;
            }
            Some(split) => {
                params.group.advance = 0;
                params.phases = phase::COUNT;
                launch(&self.core, &self.on, &params, self.sms.send, None)?;
                split.meet(&self.on.stream)?;
                params.group.advance = 1;
                params.phases = phase::MOVE;
                launch(&self.core, &self.on, &params, self.sms.send, None)?;
                split.meet(&self.on.stream)?;
                if self.fused {
                    self.launch_receive(self.params)?;
                }
            }
        }
        if self.fused {
            self.progress.receive(Operation::Dispatch)?;
        } else {
            self.core.set_open(Open {
                progress: Arc::clone(&self.progress),
                recorded: self.on.recorded,
                discard: Discard::Dispatch(Box::new(self.params)),
            });
        }
        self.on.end()
    }

    /// Launches the receiving half.
    fn launch_receive(&self, mut params: DispatchParams) -> Result<()> {
        params.group.state = self.core.state(Half::Receive);
        params.group.advance = 1;
        params.phases = phase::RECEIVE;
        launch(&self.core, &self.on, &params, self.sms.receive, None)?;
        if self.beside() {
            self.on.join()?;
        }
        self.on.end()
    }

    /// Whether the two halves run beside each other.
    fn beside(&self) -> bool {
        let sms = self.sms;
        !self.fused && self.core.split.is_none() && sms.receive + sms.send <= sms.total
    }

    /// Waits on the GPU for what is on its way, and lets it go.
    fn give_up(&self) -> Result<()> {
        if !self.on.is_recorded_as_begun() {
            tracing::warn!("a recorded dispatch was left unfinished: its graph cannot be replayed");
        } else if self.progress.abandon() {
            discard(&self.on, self.params)?;
        } else if self.progress.is_abandoned() && self.beside() && !self.on.recorded {
            // Its inputs may be in use until then.
            self.on.follow_join()?;
        }
        Ok(())
    }

    fn made_handle(&self, input: &DispatchInput<'_>, rows: usize) -> Result<DispatchHandle> {
        if let Routes::Handle(handle) = input.routes {
            let Some(block) = &self.padding else {
                return Ok(handle.clone());
            };
            let (at, device) = (block.address(), self.device);
            let src_idx = device_tensor(at, DType::I32, &[rows], device, block)?;
            return Ok(handle.padded(src_idx));
        }
        let parts = self.handle.as_ref().expect("made with the call");
        parts.handle(self.core.rank, self.device, rows, None)
    }

    /// A tensor in the landing block.
    fn landed(&self, at: u64, dtype: DType, shape: &[usize]) -> Result<OwnedTensor> {
        let address = self.landing.address() + at;
        device_tensor(address, dtype, shape, self.device, &self.landing)
    }
}

impl DispatchCall for InFlight {
    fn counts(&mut self, _: &DispatchInput<'_>) -> Result<&ReceivedCounts> {
        if let (Some(rows), None) = (self.worst, &self.counts) {
            self.counts = Some(self.worst_counts(rows));
            return Ok(self.counts.as_ref().expect("just set"));
        }
        self.wait_counts()
    }

    fn finish(&mut self, input: &DispatchInput<'_>) -> Result<Dispatched> {
        let counts = self.known_counts()?;
        let rows = counts.output_rows;
        if self.progress.receive(Operation::Dispatch)? {
            // Rows stay where they land; only this rank's own are still to be put there.
            self.launch_receive(self.params)?;
        }
        let parts = self.layout.parts(self.params.capacity as usize);
        let row_bytes = u64::from(self.params.row_bytes);
        if !self.on.recorded {
            self.landing.shrink(parts.rows + rows as u64 * row_bytes);
        }
        let choices = choices(input);
        let part = |wanted: Option<(DType, usize)>, at: u64| -> Result<Option<OwnedTensor>> {
            wanted
                .map(|(dtype, columns)| self.landed(at, dtype, &[rows, columns]))
                .transpose()
        };
        let columns = |tensor: Tensor<'_>| (tensor.dtype(), tensor.shape()[1]);
        Ok(Dispatched {
            x: Loan::new(
                Box::new(CudaLoan::new(&self.landing, parts.rows, self.device)),
                input.x.dtype(),
                &[rows, input.x.shape()[1]],
            ),
            scales: part(input.scales.map(columns), parts.scales)?,
            topk_idx: part(choices.map(|c| columns(c.idx)), parts.topk)?,
            topk_weights: part(choices.and_then(|c| c.weights).map(columns), parts.weights)?,
            handle: self.made_handle(input, rows)?,
            counts,
        })
    }

    fn finish_into(
        &mut self,
        input: &DispatchInput<'_>,
        out: &mut DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        let counts = self.known_counts()?;
        let rows = counts.output_rows;
        check_dispatch_output(input, out, rows)?;
        let address = |tensor: &mut Option<crate::TensorMut<'_>>| {
            tensor
                .as_mut()
                .map_or(0, |tensor| tensor.as_mut_ptr() as u64)
        };
        let mut params = self.params;
        params.out_rows = rows as u32;
        params.out_x = out.x.as_mut_ptr() as u64;
        params.out_stride = (out.x.strides()[0] * out.x.dtype().size()) as u64;
        params.out_topk = address(&mut out.topk_idx);
        params.out_weights = address(&mut out.topk_weights);
        params.out_scales = address(&mut out.scales);
        if self.progress.receive(Operation::Dispatch)? {
            self.launch_receive(params)?;
        } else {
            self.copy_out(&params, rows)?;
        }
        Ok((counts, self.made_handle(input, rows)?))
    }
}

impl InFlight {
    /// Copies what landed at its final place to the caller's memory after all.
    fn copy_out(&self, params: &DispatchParams, rows: usize) -> Result<()> {
        let parts = self.layout.parts(self.params.capacity as usize);
        let base = self.landing.address();
        let copies = [
            (
                params.out_x,
                params.out_stride,
                base + parts.rows,
                u64::from(params.row_bytes),
            ),
            (
                params.out_topk,
                self.layout.topk_bytes,
                base + parts.topk,
                self.layout.topk_bytes,
            ),
            (
                params.out_weights,
                self.layout.weight_bytes,
                base + parts.weights,
                self.layout.weight_bytes,
            ),
            (
                params.out_scales,
                self.layout.scale_bytes,
                base + parts.scales,
                self.layout.scale_bytes,
            ),
        ];
        for (to, to_stride, from, bytes) in copies {
            if to == 0 || rows == 0 {
                continue;
            }
            // SAFETY: both hold `rows` rows of so many bytes; the caller keeps its memory.
            unsafe {
                self.on
                    .stream
                    .copy_rows((to, to_stride), (from, bytes), bytes, rows)?;
            }
        }
        self.on.end()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // A call that was not finished still takes its rows, into nothing.
        if let Err(error) = self.give_up() {
            tracing::warn!(%error, "a dispatch that was not finished");
        }
    }
}

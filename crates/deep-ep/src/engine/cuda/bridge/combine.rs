//! High-throughput combine of host tensors.

use std::sync::Arc;

use super::{lane::Lane, loan::HostLoan};
use crate::{
    buffer::{CombineInput, CombineOutput, CombineRows, DispatchHandle},
    engine::CombineCall,
    error::Result,
    tensor::OwnedTensor,
};

/// Device copies of the inputs.
pub(super) struct Inputs {
    /// The rows; `None` if they are a loan of a bridge, which has a device loan.
    x: Option<OwnedTensor>,
    handle: DispatchHandle,
    topk_weights: Option<OwnedTensor>,
    bias: [Option<OwnedTensor>; 2],
}

impl Inputs {
    pub(super) fn new(lane: &Lane, input: &CombineInput<'_>) -> Result<Self> {
        let x = match HostLoan::of(&input.x) {
            Some(loan) => {
                loan.update(lane)?;
                None
            }
            None => Some(lane.up(&input.x.as_tensor())?),
        };
        let [first, second] = &input.bias;
        Ok(Self {
            x,
            handle: lane.device_handle(input.handle)?,
            topk_weights: lane.up_if(input.topk_weights.as_ref())?,
            bias: [lane.up_if(first.as_ref())?, lane.up_if(second.as_ref())?],
        })
    }

    /// `input` with the copies in place of its tensors, on the bridge's stream.
    fn view<'a>(&'a self, lane: &Lane, input: &CombineInput<'a>) -> CombineInput<'a> {
        CombineInput {
            x: rows(self.x.as_ref(), &input.x),
            handle: &self.handle,
            topk_weights: self.topk_weights.as_ref().map(OwnedTensor::as_tensor),
            bias: self.bias.each_ref().map(|bias| {
                let bias = bias.as_ref();
                bias.map(OwnedTensor::as_tensor)
            }),
            num_sms: input.num_sms,
            stream: lane.stream.as_stream(),
        }
    }
}

/// The rows on the device: the copy if there is one, else the device loan.
pub(super) fn rows<'a>(copy: Option<&'a OwnedTensor>, rows: &CombineRows<'a>) -> CombineRows<'a> {
    match (copy, HostLoan::of(rows)) {
        (Some(copy), _) => CombineRows::Caller(copy.as_tensor()),
        (None, Some(loan)) => CombineRows::Loan(loan.device()),
        (None, None) => *rows,
    }
}

pub(super) struct Call {
    // Before what it works on, and the stream it works on last.
    call: Box<dyn CombineCall>,
    inputs: Inputs,
    lane: Arc<Lane>,
}

impl Call {
    pub(super) fn new(lane: &Arc<Lane>, inputs: Inputs, input: &CombineInput<'_>) -> Result<Self> {
        Ok(Self {
            call: lane.inner.combine(&inputs.view(lane, input))?,
            inputs,
            lane: Arc::clone(lane),
        })
    }
}

impl CombineCall for Call {
    fn finish_into(&mut self, input: &CombineInput<'_>, out: &mut CombineOutput<'_>) -> Result<()> {
        let lane = &self.lane;
        let mut x = lane.twin("combined_x", &out.x.as_tensor())?;
        let weights = out.topk_weights.as_ref();
        let mut topk_weights = lane.twin_if("combined_topk_weights", weights)?;
        let mut twins = CombineOutput {
            x: x.as_tensor_mut(),
            topk_weights: topk_weights.as_mut().map(OwnedTensor::as_tensor_mut),
        };
        let view = self.inputs.view(lane, input);
        self.call.finish_into(&view, &mut twins)?;
        lane.settle()?;
        lane.down_into(Some(&x), Some(&mut out.x))?;
        lane.down_into(topk_weights.as_ref(), out.topk_weights.as_mut())
    }
}

//! Low-latency combine of host tensors.

use std::sync::Arc;

use crate::{
    buffer::{LowLatencyCombineInput, LowLatencyHandle},
    engine::{
        LowLatencyCombineCall,
        cuda::bridge::{combine::rows, handles::rows_in_use, lane::Lane, loan::HostLoan},
    },
    error::Result,
    tensor::{OwnedTensor, TensorMut},
};

/// Device copies of the inputs.
pub(crate) struct Inputs {
    /// The rows; `None` if they are a loan of a bridge, which has a device loan.
    x: Option<OwnedTensor>,
    topk_idx: OwnedTensor,
    topk_weights: OwnedTensor,
    handle: LowLatencyHandle,
    wait_stats: Option<OwnedTensor>,
}

impl Inputs {
    pub(crate) fn new(lane: &Lane, input: &LowLatencyCombineInput<'_>) -> Result<Self> {
        let counts = rows_in_use(input.handle);
        let x = match HostLoan::of(&input.x) {
            Some(loan) => {
                loan.update_rows(lane, &counts)?;
                None
            }
            None => {
                let host = input.x.as_tensor();
                let copy = lane.dense(&host)?;
                // SAFETY: nothing uses the copy yet.
                unsafe { lane.rows_up(&host, &copy.as_tensor(), &counts)? };
                Some(copy)
            }
        };
        let wait_stats = input.wait_stats.as_ref().map(TensorMut::as_tensor);
        Ok(Self {
            x,
            topk_idx: lane.up(&input.topk_idx)?,
            topk_weights: lane.up(&input.topk_weights)?,
            handle: lane.device_low_latency_handle(input.handle)?,
            wait_stats: lane.up_if(wait_stats.as_ref())?,
        })
    }

    /// `input` with the copies in place of its tensors, on the bridge's stream.
    fn view<'a>(
        &'a mut self,
        lane: &Lane,
        input: &'a LowLatencyCombineInput<'_>,
    ) -> LowLatencyCombineInput<'a> {
        LowLatencyCombineInput {
            x: rows(self.x.as_ref(), &input.x),
            topk_idx: self.topk_idx.as_tensor(),
            topk_weights: self.topk_weights.as_tensor(),
            handle: &self.handle,
            wire: input.wire,
            wait_stats: self.wait_stats.as_mut().map(OwnedTensor::as_tensor_mut),
            at_once: input.at_once,
            stream: lane.stream.as_stream(),
        }
    }
}

pub(crate) struct Call {
    // Before what it works on, and the stream it works on last.
    call: Box<dyn LowLatencyCombineCall>,
    inputs: Inputs,
    lane: Arc<Lane>,
}

impl Call {
    pub(crate) fn new(
        lane: &Arc<Lane>,
        mut inputs: Inputs,
        input: &LowLatencyCombineInput<'_>,
    ) -> Result<Self> {
        let mut view = inputs.view(lane, input);
        let call = lane.inner.low_latency_combine(&mut view)?;
        // What a rank rejects is an error of the send, which needs the choices of all ranks.
        lane.settle()?;
        Ok(Self {
            call,
            inputs,
            lane: Arc::clone(lane),
        })
    }
}

impl LowLatencyCombineCall for Call {
    fn finish_into(
        &mut self,
        input: &mut LowLatencyCombineInput<'_>,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let lane = &self.lane;
        let mut twin = lane.twin("out", &out.as_tensor())?;
        let mut view = self.inputs.view(lane, input);
        self.call.finish_into(&mut view, twin.as_tensor_mut())?;
        lane.settle()?;
        lane.down_into(Some(&twin), Some(&mut out))?;
        lane.down_into(self.inputs.wait_stats.as_ref(), input.wait_stats.as_mut())
    }
}

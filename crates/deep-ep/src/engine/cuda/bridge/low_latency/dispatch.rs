//! Low-latency dispatch of host tensors.

use std::{cell::OnceCell, sync::Arc};

use crate::{
    buffer::{LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyHandle},
    engine::{LowLatencyDispatchCall, cuda::bridge::lane::Lane},
    error::Result,
    tensor::{OwnedTensor, Tensor, TensorMut},
};

/// Device copies of the inputs.
pub(crate) struct Inputs {
    x: OwnedTensor,
    topk_idx: OwnedTensor,
    recv_stats: Option<OwnedTensor>,
    wait_stats: Option<OwnedTensor>,
}

impl Inputs {
    pub(crate) fn new(lane: &Lane, input: &LowLatencyDispatchInput<'_>) -> Result<Self> {
        let stats = |stats: &Option<TensorMut<'_>>| {
            let stats = stats.as_ref().map(TensorMut::as_tensor);
            lane.up_if(stats.as_ref())
        };
        Ok(Self {
            x: lane.up(&input.x)?,
            topk_idx: lane.up(&input.topk_idx)?,
            recv_stats: stats(&input.recv_stats)?,
            wait_stats: stats(&input.wait_stats)?,
        })
    }

    /// `input` with the copies in place of its tensors, on the bridge's stream; no statistics.
    fn view<'a>(
        &'a self,
        lane: &Lane,
        input: &LowLatencyDispatchInput<'_>,
    ) -> LowLatencyDispatchInput<'a> {
        view(lane, input, self.x.as_tensor(), self.topk_idx.as_tensor())
    }

    /// The same with the statistics.
    fn view_mut<'a>(
        &'a mut self,
        lane: &Lane,
        input: &LowLatencyDispatchInput<'_>,
    ) -> LowLatencyDispatchInput<'a> {
        LowLatencyDispatchInput {
            recv_stats: self.recv_stats.as_mut().map(OwnedTensor::as_tensor_mut),
            wait_stats: self.wait_stats.as_mut().map(OwnedTensor::as_tensor_mut),
            ..view(lane, input, self.x.as_tensor(), self.topk_idx.as_tensor())
        }
    }
}

fn view<'a>(
    lane: &Lane,
    input: &LowLatencyDispatchInput<'_>,
    x: Tensor<'a>,
    topk_idx: Tensor<'a>,
) -> LowLatencyDispatchInput<'a> {
    LowLatencyDispatchInput {
        x,
        topk_idx,
        max_tokens_per_rank: input.max_tokens_per_rank,
        num_experts: input.num_experts,
        format: input.format,
        recv_stats: None,
        wait_stats: None,
        at_once: input.at_once,
        stream: lane.stream.as_stream(),
    }
}

pub(crate) struct Call {
    // Before what it works on, and the stream it works on last.
    call: Box<dyn LowLatencyDispatchCall>,
    inputs: Inputs,
    /// Rows and scales on the device, if `allocate` was called.
    allocated: OnceCell<(OwnedTensor, Option<OwnedTensor>)>,
    lane: Arc<Lane>,
}

impl Call {
    pub(crate) fn new(
        lane: &Arc<Lane>,
        mut inputs: Inputs,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Self> {
        Ok(Self {
            call: lane
                .inner
                .low_latency_dispatch(&inputs.view_mut(lane, input))?,
            inputs,
            allocated: OnceCell::new(),
            lane: Arc::clone(lane),
        })
    }

    /// Device tensors for the outputs: those of `allocate` if they are alike.
    fn outputs(
        &mut self,
        out: &LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, Option<OwnedTensor>)> {
        let scales = out.scales.as_ref().map(TensorMut::as_tensor);
        if let Some((x, own)) = self.allocated.take()
            && alike(&x.as_tensor(), &out.x.as_tensor())
            && match (&own, &scales) {
                (Some(own), Some(scales)) => alike(&own.as_tensor(), scales),
                (own, scales) => own.is_none() && scales.is_none(),
            }
        {
            return Ok((x, own));
        }
        Ok((
            self.lane.twin("recv_x", &out.x.as_tensor())?,
            self.lane
                .twin_if("recv_x[1] (scales)", out.scales.as_ref())?,
        ))
    }
}

/// Whether one is, or could be, the twin of the other.
fn alike(device: &Tensor<'_>, host: &Tensor<'_>) -> bool {
    host.device() == crate::Device::Host
        && (device.dtype(), device.shape(), device.strides())
            == (host.dtype(), host.shape(), host.strides())
}

impl LowLatencyDispatchCall for Call {
    fn allocate(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<(OwnedTensor, Option<OwnedTensor>)> {
        let host = |device: &OwnedTensor| {
            OwnedTensor::zeros_strided(device.dtype(), device.shape(), device.strides())
        };
        let (x, scales) = self.call.allocate(&self.inputs.view(&self.lane, input))?;
        let copies = (host(&x)?, scales.as_ref().map(host).transpose()?);
        // A second call would make outputs that nobody takes.
        let _ = self.allocated.set((x, scales));
        Ok(copies)
    }

    fn finish_into(
        &mut self,
        input: &mut LowLatencyDispatchInput<'_>,
        out: &mut LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let (mut x, mut scales) = self.outputs(out)?;
        let lane = &self.lane;
        let mut twins = LowLatencyDispatchOutput {
            x: x.as_tensor_mut(),
            scales: scales.as_mut().map(OwnedTensor::as_tensor_mut),
        };
        let mut view = self.inputs.view_mut(lane, input);
        let (recv_count, handle) = self.call.finish_into(&mut view, &mut twins)?;
        lane.settle()?;
        let recv_count = lane.down(&recv_count.as_tensor())?;
        let counts = recv_count.as_slice::<i32>()?.iter();
        let counts: Vec<usize> = counts.map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        lane.rows_down(&x, &mut out.x, &counts)?;
        lane.down_into(scales.as_ref(), out.scales.as_mut())?;
        lane.down_into(self.inputs.recv_stats.as_ref(), input.recv_stats.as_mut())?;
        lane.down_into(self.inputs.wait_stats.as_ref(), input.wait_stats.as_mut())?;
        Ok((recv_count, lane.host_low_latency_handle(&handle)?))
    }
}

//! High-throughput dispatch of host tensors.

use std::sync::Arc;

use super::{handles::complete, lane::Lane, loan};
use crate::{
    buffer::{
        DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Layout, ReceivedCounts, Routes,
        TopK,
    },
    engine::DispatchCall,
    error::Result,
    tensor::OwnedTensor,
};

/// Device copies of the inputs.
pub(super) struct Inputs {
    x: OwnedTensor,
    scales: Option<OwnedTensor>,
    routes: OwnedRoutes,
}

enum OwnedRoutes {
    TopK {
        topk: OwnedTopK,
        num_experts: usize,
    },
    Layout {
        layout: Layout,
        topk: Option<OwnedTopK>,
    },
    Handle(DispatchHandle),
}

struct OwnedTopK {
    idx: OwnedTensor,
    weights: Option<OwnedTensor>,
}

impl OwnedTopK {
    fn new(lane: &Lane, topk: &TopK<'_>) -> Result<Self> {
        Ok(Self {
            idx: lane.up(&topk.idx)?,
            weights: lane.up_if(topk.weights.as_ref())?,
        })
    }

    fn view(&self) -> TopK<'_> {
        TopK {
            idx: self.idx.as_tensor(),
            weights: self.weights.as_ref().map(OwnedTensor::as_tensor),
        }
    }
}

impl Inputs {
    pub(super) fn new(lane: &Lane, input: &DispatchInput<'_>) -> Result<Self> {
        Ok(Self {
            x: lane.up(&input.x)?,
            scales: lane.up_if(input.scales.as_ref())?,
            routes: match &input.routes {
                Routes::TopK { topk, num_experts } => OwnedRoutes::TopK {
                    topk: OwnedTopK::new(lane, topk)?,
                    num_experts: *num_experts,
                },
                Routes::Layout { layout, topk } => OwnedRoutes::Layout {
                    layout: lane.device_layout(layout)?,
                    topk: topk
                        .as_ref()
                        .map(|topk| OwnedTopK::new(lane, topk))
                        .transpose()?,
                },
                Routes::Handle(handle) => OwnedRoutes::Handle(lane.device_handle(handle)?),
            },
        })
    }

    /// `input` with the copies in place of its tensors, on the bridge's stream.
    fn view<'a>(&'a self, lane: &Lane, input: &DispatchInput<'_>) -> DispatchInput<'a> {
        DispatchInput {
            x: self.x.as_tensor(),
            scales: self.scales.as_ref().map(OwnedTensor::as_tensor),
            routes: match &self.routes {
                OwnedRoutes::TopK { topk, num_experts } => Routes::TopK {
                    topk: topk.view(),
                    num_experts: *num_experts,
                },
                OwnedRoutes::Layout { layout, topk } => Routes::Layout {
                    layout,
                    topk: topk.as_ref().map(OwnedTopK::view),
                },
                OwnedRoutes::Handle(handle) => Routes::Handle(handle),
            },
            expert_alignment: input.expert_alignment,
            num_worst_tokens: input.num_worst_tokens,
            landing: input.landing,
            num_sms: input.num_sms,
            stream: lane.stream.as_stream(),
        }
    }
}

pub(super) struct Call {
    // Before what it works on, and the stream it works on last.
    call: Box<dyn DispatchCall>,
    inputs: Inputs,
    lane: Arc<Lane>,
}

impl Call {
    pub(super) fn new(lane: &Arc<Lane>, inputs: Inputs, input: &DispatchInput<'_>) -> Result<Self> {
        Ok(Self {
            call: lane.inner.dispatch(&inputs.view(lane, input))?,
            inputs,
            lane: Arc::clone(lane),
        })
    }
}

impl DispatchCall for Call {
    fn counts(&mut self, input: &DispatchInput<'_>) -> Result<&ReceivedCounts> {
        self.call.counts(&self.inputs.view(&self.lane, input))
    }

    fn finish(&mut self, input: &DispatchInput<'_>) -> Result<Dispatched> {
        let lane = &self.lane;
        let done = self.call.finish(&self.inputs.view(lane, input))?;
        lane.settle()?;
        let handle = lane.host_handle(&done.handle)?;
        Ok(Dispatched {
            x: loan::received(lane, done.x)?,
            scales: lane.down_if(done.scales.as_ref())?,
            topk_idx: lane.down_if(done.topk_idx.as_ref())?,
            topk_weights: lane.down_if(done.topk_weights.as_ref())?,
            counts: complete(done.counts, &handle),
            handle,
        })
    }

    fn finish_into(
        &mut self,
        input: &DispatchInput<'_>,
        out: &mut DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        let lane = &self.lane;
        let mut x = lane.twin("recv_x", &out.x.as_tensor())?;
        let mut scales = lane.twin_if("recv_x[1] (scales)", out.scales.as_ref())?;
        let mut topk_idx = lane.twin_if("recv_topk_idx", out.topk_idx.as_ref())?;
        let mut topk_weights = lane.twin_if("recv_topk_weights", out.topk_weights.as_ref())?;
        let mut twins = DispatchOutput {
            x: x.as_tensor_mut(),
            scales: scales.as_mut().map(OwnedTensor::as_tensor_mut),
            topk_idx: topk_idx.as_mut().map(OwnedTensor::as_tensor_mut),
            topk_weights: topk_weights.as_mut().map(OwnedTensor::as_tensor_mut),
        };
        let view = self.inputs.view(lane, input);
        let (counts, handle) = self.call.finish_into(&view, &mut twins)?;
        lane.settle()?;
        let handle = lane.host_handle(&handle)?;
        lane.down_into(Some(&x), Some(&mut out.x))?;
        lane.down_into(scales.as_ref(), out.scales.as_mut())?;
        lane.down_into(topk_idx.as_ref(), out.topk_idx.as_mut())?;
        lane.down_into(topk_weights.as_ref(), out.topk_weights.as_mut())?;
        Ok((complete(counts, &handle), handle))
    }
}

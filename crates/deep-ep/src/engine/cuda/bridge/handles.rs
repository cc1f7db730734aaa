//! Handles and layouts of one side made from those of the other.

use super::lane::Lane;
use crate::{
    buffer::{
        DeviceLayout, DeviceRoutes, DispatchHandle, Layout, LowLatencyHandle, ReceivedCounts,
    },
    error::Result,
    tensor::Tensor,
};

impl Lane {
    /// A device layout of a host layout.
    pub(super) fn device_layout(&self, layout: &Layout) -> Result<Layout> {
        Layout::from_device_parts(DeviceLayout {
            num_tokens_per_rank: self.up(&layout.num_tokens_per_rank())?,
            num_tokens_per_expert: self.up(&layout.num_tokens_per_expert())?,
            is_token_in_rank: self.up(&layout.is_token_in_rank())?,
        })
    }

    /// A host layout of a device layout.
    pub(super) fn host_layout(&self, layout: &Layout) -> Result<Layout> {
        Layout::from_parts(
            self.down(&layout.is_token_in_rank())?.as_tensor(),
            self.down(&layout.num_tokens_per_rank())?.as_tensor(),
            self.down(&layout.num_tokens_per_expert())?.as_tensor(),
        )
    }

    /// A device handle of a host handle.
    pub(super) fn device_handle(&self, handle: &DispatchHandle) -> Result<DispatchHandle> {
        // A device handle has as many source tokens as combine's input must have rows.
        let rows = handle.num_recv_rows();
        let src_idx = handle.recv_src_idx();
        let src_idx = Tensor::new(&src_idx.as_slice::<i32>()?[..rows], &[rows])?;
        DispatchHandle::from_device_parts(DeviceRoutes {
            rank: handle.rank(),
            rank_prefix_matrix: self.up(&handle.rank_prefix_matrix())?,
            channel_prefix_matrix: self.up(&handle.channel_prefix_matrix())?,
            recv_channel_prefix_matrix: self.up(&handle.recv_channel_prefix_matrix())?,
            recv_src_idx: self.up(&src_idx)?,
            is_token_in_rank: self.up(&handle.is_token_in_rank())?,
            send_head: self.up(&handle.send_head())?,
            remote_rows: None,
        })
    }

    /// A host handle of a device handle.
    pub(super) fn host_handle(&self, handle: &DispatchHandle) -> Result<DispatchHandle> {
        DispatchHandle::from_parts(
            handle.rank(),
            self.down(&handle.rank_prefix_matrix())?.as_tensor(),
            self.down(&handle.recv_src_idx())?.as_tensor(),
            self.down(&handle.is_token_in_rank())?.as_tensor(),
        )
    }

    /// A device handle of a host handle.
    pub(super) fn device_low_latency_handle(
        &self,
        handle: &LowLatencyHandle,
    ) -> Result<LowLatencyHandle> {
        LowLatencyHandle::from_device_parts(
            self.up(&handle.src_info())?,
            self.up(&handle.layout_range())?,
            handle.max_tokens_per_rank(),
            handle.hidden(),
        )
    }

    /// A host handle of a device handle.
    pub(super) fn host_low_latency_handle(
        &self,
        handle: &LowLatencyHandle,
    ) -> Result<LowLatencyHandle> {
        LowLatencyHandle::from_parts(
            self.down(&handle.src_info())?.as_tensor(),
            self.down(&handle.layout_range())?.as_tensor(),
            handle.max_tokens_per_rank(),
            handle.hidden(),
            handle.num_experts(),
        )
    }
}

/// Fills in the counts that the engine did not wait for, from the host handle.
pub(super) fn complete(mut counts: ReceivedCounts, handle: &DispatchHandle) -> ReceivedCounts {
    if counts.rows.is_none() {
        counts.rows = Some(handle.num_recv_rows());
        counts.rows_from = handle.rows_from();
    }
    counts
}

/// Rows of each local expert in a host handle, wherever they lie.
pub(super) fn rows_in_use(handle: &LowLatencyHandle) -> Vec<usize> {
    let &[local, ranks] = handle.layout_range().shape() else {
        return vec![];
    };
    (0..local)
        .map(|expert| {
            let ends = (0..ranks).map(|source| {
                let (begin, count) = handle.range(expert, source);
                begin + count
            });
            ends.max().unwrap_or(0)
        })
        .collect()
}

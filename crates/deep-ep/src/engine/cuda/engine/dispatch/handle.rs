//! The block of device memory that a handle's tensors lie in.

use std::sync::Arc;

use crate::{
    buffer::{DeviceRoutes, DispatchHandle},
    dtype::DType,
    engine::cuda::engine::{
        core::{Core, Piece},
        landing::device_tensor,
        params::DispatchParams,
    },
    error::Result,
    memory::heap::Purpose,
    tensor::Device,
    topology::Rank,
};

/// The block of a handle's tensors, and where they are in it.
pub(super) struct HandleParts {
    pub(super) block: Arc<Piece>,
    pub(super) tokens: usize,
    ranks: usize,
    offsets: [u64; 6],
}

impl HandleParts {
    pub(super) fn new(core: &Arc<Core>, tokens: usize, rows: usize) -> Result<Self> {
        let ranks = core.ranks;
        let sizes = [
            tokens * ranks * 4,
            tokens * ranks,
            ranks * ranks * 4,
            ranks * 4,
            ranks * 4,
            rows * 4,
        ];
        let mut bytes = 0u64;
        let offsets = sizes.map(|size| {
            let at = bytes;
            bytes += (size as u64).next_multiple_of(256);
            at
        });
        Ok(Self {
            block: Arc::new(core.block(bytes, Purpose::Metadata)?),
            tokens,
            ranks,
            offsets,
        })
    }

    fn address(&self, part: usize) -> u64 {
        self.block.address() + self.offsets[part]
    }

    pub(super) fn describe(&self, params: &mut DispatchParams) {
        params.slots = self.address(0);
        params.is_token_in_rank = self.address(1);
        params.rank_prefix = self.address(2);
        params.sent_rows = self.address(3);
        params.channel_starts = self.address(4);
        params.src_idx = self.address(5);
    }

    pub(super) fn handle(
        &self,
        rank: usize,
        device: Device,
        rows: usize,
        remote_rows: Option<usize>,
    ) -> Result<DispatchHandle> {
        let (tokens, ranks) = (self.tokens, self.ranks);
        let tensor = |part: usize, dtype: DType, shape: &[usize]| {
            device_tensor(self.address(part), dtype, shape, device, &self.block)
        };
        DispatchHandle::from_device_parts(DeviceRoutes {
            rank: Rank(rank),
            rank_prefix_matrix: tensor(2, DType::I32, &[ranks, ranks])?,
            channel_prefix_matrix: tensor(3, DType::I32, &[ranks, 1])?,
            recv_channel_prefix_matrix: tensor(4, DType::I32, &[ranks, 1])?,
            recv_src_idx: tensor(5, DType::I32, &[rows])?,
            is_token_in_rank: tensor(1, DType::U8, &[tokens, ranks])?,
            send_head: tensor(0, DType::I32, &[tokens, ranks])?,
            remote_rows,
        })
    }
}

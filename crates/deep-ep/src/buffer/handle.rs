//! Handles: the routes of a dispatch, for the calls that follow it.

use std::{fmt, sync::Arc};

use crate::{
    dtype::DType,
    error::{Error, Result},
    routing::{Routes, exclusive_prefix_sum},
    tensor::{Device, OwnedTensor, Tensor},
    topology::Rank,
};

/// The routes of a high-throughput dispatch.
///
/// A handle has no owner: it is valid on any buffer with the same rank and group, also on one made
/// later. Cloning is cheap.
#[derive(Clone)]
pub struct DispatchHandle(Arc<Data>);

#[expect(clippy::large_enum_variant, reason = "always behind an Arc")]
enum Data {
    Host(HostRoutes),
    Device(DeviceRoutes),
    /// Another device handle's routes with source tokens for worst-case outputs.
    Padded(DispatchHandle, OwnedTensor),
}

/// The tensors of a handle whose dispatch ran on a GPU; all lie there.
pub struct DeviceRoutes {
    /// The rank that made it.
    pub rank: Rank,
    /// `[R, R]` i32, see [`DispatchHandle::rank_prefix_matrix`].
    pub rank_prefix_matrix: OwnedTensor,
    /// `[R, 1]` i32, see [`DispatchHandle::channel_prefix_matrix`].
    pub channel_prefix_matrix: OwnedTensor,
    /// `[R, 1]` i32, see [`DispatchHandle::recv_channel_prefix_matrix`].
    pub recv_channel_prefix_matrix: OwnedTensor,
    /// `[N]` i32, or as many entries as worst-case outputs have rows.
    pub recv_src_idx: OwnedTensor,
    /// `[T, R]` u8.
    pub is_token_in_rank: OwnedTensor,
    /// `[T, R]` i32, see [`DispatchHandle::send_head`].
    pub send_head: OwnedTensor,
    /// Rows that other ranks get from this one, if the host knows.
    pub remote_rows: Option<usize>,
}

struct HostRoutes {
    rank: Rank,
    plan: Arc<SendPlan>,
    /// Inclusive prefix over source ranks of received rows; only column `rank` is meaningful.
    rank_prefix_matrix: Vec<i32>,
    /// Source token of each received row; worst-case outputs have more entries than rows.
    src_idx: Vec<i32>,
    /// `[R]` rows that this rank sends to each, and zeros: the channel matrices with one channel.
    channel_prefix: Vec<i32>,
    recv_channel_prefix: Vec<i32>,
}

/// Where this rank's tokens go, and in which place among the rows for each rank.
#[derive(Debug)]
pub(crate) struct SendPlan {
    pub(crate) routes: Routes,
    /// `[T, R]`: position of each token among the rows for each rank, -1 where it does not go.
    slots: Vec<i32>,
}

impl SendPlan {
    pub(crate) fn new(routes: Routes) -> Arc<Self> {
        let ranks = routes.ranks();
        let mut slots = vec![-1; routes.tokens() * ranks];
        for to in 0..ranks {
            for (slot, &token) in routes.tokens_of_rank(Rank(to)).iter().enumerate() {
                slots[token as usize * ranks + to] = slot as i32;
            }
        }
        Arc::new(Self { routes, slots })
    }

    /// Slots of one token, `[R]`, -1 where it does not go.
    pub(crate) fn slots(&self, token: usize) -> &[i32] {
        let ranks = self.routes.ranks();
        &self.slots[token * ranks..][..ranks]
    }

    /// Rows for each rank, `[R]`.
    pub(crate) fn rows(&self) -> Vec<u64> {
        self.routes
            .tokens_per_rank()
            .iter()
            .map(|&rows| u64::from(rows))
            .collect()
    }
}

impl DispatchHandle {
    pub(crate) fn new(
        rank: Rank,
        plan: Arc<SendPlan>,
        rows_from: &[usize],
        src_idx: Vec<i32>,
    ) -> Self {
        let ranks = plan.routes.ranks();
        let mut rank_prefix_matrix = vec![0; ranks * ranks];
        let mut sum = 0;
        for (source, rows) in rows_from.iter().enumerate() {
            sum += rows;
            rank_prefix_matrix[source * ranks + rank.0] = i32::try_from(sum).unwrap_or(i32::MAX);
        }
        let channel_prefix = plan
            .routes
            .tokens_per_rank()
            .iter()
            .map(|&n| n as i32)
            .collect();
        Self(Arc::new(Data::Host(HostRoutes {
            rank,
            plan,
            rank_prefix_matrix,
            src_idx,
            channel_prefix,
            recv_channel_prefix: vec![0; ranks],
        })))
    }

    /// A handle from the device tensors that one consists of.
    ///
    /// # Errors
    /// Shapes or types do not fit each other, a tensor is not dense, or they lie on different
    /// devices. Contents are not looked at: rows that contents wrongly name are not read, but
    /// results are undefined.
    pub fn from_device_parts(parts: DeviceRoutes) -> Result<Self> {
        let &[tokens, ranks] = parts.send_head.shape() else {
            return Err(Error::invalid(
                "send_head",
                format!("{:?}", parts.send_head),
                "must be i32 [T, R]",
            ));
        };
        let device = parts.send_head.device();
        let rows = parts.recv_src_idx.shape()[0];
        for (name, tensor, dtype, shape) in [
            (
                "rank_prefix_matrix",
                &parts.rank_prefix_matrix,
                DType::I32,
                &[ranks, ranks][..],
            ),
            (
                "channel_prefix_matrix",
                &parts.channel_prefix_matrix,
                DType::I32,
                &[ranks, 1],
            ),
            (
                "recv_channel_prefix_matrix",
                &parts.recv_channel_prefix_matrix,
                DType::I32,
                &[ranks, 1],
            ),
            ("recv_src_idx", &parts.recv_src_idx, DType::I32, &[rows]),
            (
                "is_token_in_rank",
                &parts.is_token_in_rank,
                DType::U8,
                &[tokens, ranks],
            ),
            ("send_head", &parts.send_head, DType::I32, &[tokens, ranks]),
        ] {
            let fits = tensor.dtype() == dtype
                && tensor.shape() == shape
                && tensor.is_dense()
                && tensor.device() == device
                && device != Device::Host;
            if !fits || parts.rank.0 >= ranks {
                return Err(Error::invalid(
                    name,
                    format!("{tensor:?} of rank {}", parts.rank),
                    format!("must be dense {dtype} {shape:?} on a device, {device:?} as send_head"),
                ));
            }
        }
        Ok(Self(Arc::new(Data::Device(parts))))
    }

    /// The device tensors, if it is a handle of a GPU.
    pub(crate) fn on_device(&self) -> Option<&DeviceRoutes> {
        match &*self.0 {
            Data::Host(_) => None,
            Data::Device(parts) => Some(parts),
            Data::Padded(handle, _) => handle.on_device(),
        }
    }

    /// A device handle of the same routes, whose source tokens are `recv_src_idx` `[W]` i32.
    pub(crate) fn padded(&self, recv_src_idx: OwnedTensor) -> Self {
        Self(Arc::new(Data::Padded(self.clone(), recv_src_idx)))
    }

    /// The host routes. A buffer checks that a handle fits its engine before an engine sees it.
    fn host(&self) -> &HostRoutes {
        match &*self.0 {
            Data::Host(routes) => routes,
            Data::Device(_) | Data::Padded(..) => {
                unreachable!("engines see handles of their own device only")
            }
        }
    }

    /// Where its tensors lie.
    pub fn device(&self) -> Device {
        self.send_head().device()
    }

    /// A handle from the tensors that one consists of: `rank_prefix_matrix` `[R, R]` i32,
    /// `recv_src_idx` `[N]` i32 and `is_token_in_rank` `[T, R]` u8.
    ///
    /// # Errors
    /// A shape or type differs, or the prefix sums decrease or do not fit `recv_src_idx`.
    pub fn from_parts(
        rank: Rank,
        rank_prefix_matrix: Tensor<'_>,
        recv_src_idx: Tensor<'_>,
        is_token_in_rank: Tensor<'_>,
    ) -> Result<Self> {
        let &[_, ranks] = is_token_in_rank.shape() else {
            return Err(Error::invalid(
                "is_token_in_rank",
                format!("{is_token_in_rank:?}"),
                "must be u8 [T, R]",
            ));
        };
        let mut routes = Routes::new();
        routes.rebuild_from_ranks(&is_token_in_rank, ranks)?;
        if rank_prefix_matrix.shape() != [ranks, ranks] || rank.0 >= ranks {
            return Err(Error::invalid(
                "rank_prefix_matrix",
                format!("{rank_prefix_matrix:?} on rank {rank}"),
                format!("must be i32 [{ranks}, {ranks}] as is_token_in_rank says"),
            ));
        }
        let matrix = rank_prefix_matrix.as_slice::<i32>()?;
        let src_idx = recv_src_idx.as_slice::<i32>()?.to_vec();
        let mut rows_from = Vec::with_capacity(ranks);
        let mut before = 0i32;
        for source in 0..ranks {
            let sum = matrix[source * ranks + rank.0];
            if sum < before || sum as usize > src_idx.len() {
                return Err(Error::invalid(
                    format!("rank_prefix_matrix[{source}, {rank}]"),
                    sum,
                    format!(
                        "must lie between {before} and the {} rows of recv_src_idx",
                        src_idx.len()
                    ),
                ));
            }
            rows_from.push((sum - before) as usize);
            before = sum;
        }
        Ok(Self::new(rank, SendPlan::new(routes), &rows_from, src_idx))
    }

    /// The rank that made it.
    pub fn rank(&self) -> Rank {
        match &*self.0 {
            Data::Host(routes) => routes.rank,
            Data::Device(parts) => parts.rank,
            Data::Padded(handle, _) => handle.rank(),
        }
    }

    /// Ranks of the group, `R`.
    pub fn num_ranks(&self) -> usize {
        self.send_head().shape()[1]
    }

    /// Tokens of this rank, `T`.
    pub fn num_tokens(&self) -> usize {
        self.send_head().shape()[0]
    }

    /// Rows that this rank received, `N`. On a GPU, where the host may not know it, the rows of
    /// the outputs: `N`, or the worst case if the dispatch was made for one.
    pub fn num_recv_rows(&self) -> usize {
        match &*self.0 {
            Data::Host(routes) => {
                let ranks = self.num_ranks();
                routes.rank_prefix_matrix[(ranks - 1) * ranks + routes.rank.0] as usize
            }
            Data::Device(parts) => parts.recv_src_idx.shape()[0],
            Data::Padded(_, src_idx) => src_idx.shape()[0],
        }
    }

    /// `[R, R]` i32: element `[s, rank]` is the inclusive prefix over source ranks of rows received
    /// from `s`; other columns are 0.
    pub fn rank_prefix_matrix(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => {
                let ranks = self.num_ranks();
                view(&routes.rank_prefix_matrix, &[ranks, ranks])
            }
            Data::Device(parts) => parts.rank_prefix_matrix.as_tensor(),
            Data::Padded(handle, _) => handle.rank_prefix_matrix(),
        }
    }

    /// `[R, 1]` i32: rows sent to each rank, the channel prefix matrix with one channel.
    pub fn channel_prefix_matrix(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => view(&routes.channel_prefix, &[self.num_ranks(), 1]),
            Data::Device(parts) => parts.channel_prefix_matrix.as_tensor(),
            Data::Padded(handle, _) => handle.channel_prefix_matrix(),
        }
    }

    /// `[R, 1]` i32: where each source's only channel begins among its rows, which is 0.
    pub fn recv_channel_prefix_matrix(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => view(&routes.recv_channel_prefix, &[self.num_ranks(), 1]),
            Data::Device(parts) => parts.recv_channel_prefix_matrix.as_tensor(),
            Data::Padded(handle, _) => handle.recv_channel_prefix_matrix(),
        }
    }

    /// `[N]` i32 (or as many as worst-case outputs have): source token of each received row.
    pub fn recv_src_idx(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => view(&routes.src_idx, &[routes.src_idx.len()]),
            Data::Device(parts) => parts.recv_src_idx.as_tensor(),
            Data::Padded(_, src_idx) => src_idx.as_tensor(),
        }
    }

    /// `[T, R]` u8, 0 or 1.
    pub fn is_token_in_rank(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => Tensor::new(
                routes.plan.routes.is_token_in_rank(),
                &[self.num_tokens(), self.num_ranks()],
            )
            .expect("routes have a byte for each token and rank"),
            Data::Device(parts) => parts.is_token_in_rank.as_tensor(),
            Data::Padded(handle, _) => handle.is_token_in_rank(),
        }
    }

    /// `[T, R]` i32: position of the token among the rows that went to the rank, -1 where it did
    /// not go.
    pub fn send_head(&self) -> Tensor<'_> {
        match &*self.0 {
            Data::Host(routes) => {
                let plan = &routes.plan;
                view(&plan.slots, &[plan.routes.tokens(), plan.routes.ranks()])
            }
            Data::Device(parts) => parts.send_head.as_tensor(),
            Data::Padded(handle, _) => handle.send_head(),
        }
    }

    pub(crate) fn plan(&self) -> &Arc<SendPlan> {
        &self.host().plan
    }

    /// Rows received from each source.
    pub(crate) fn rows_from(&self) -> Vec<usize> {
        let (ranks, me) = (self.num_ranks(), self.rank().0);
        let mut before = 0;
        (0..ranks)
            .map(|source| {
                let sum = self.host().rank_prefix_matrix[source * ranks + me];
                std::mem::replace(&mut before, sum).abs_diff(sum) as usize
            })
            .collect()
    }

    /// First row received from each source.
    pub(crate) fn first_row_from(&self) -> Vec<usize> {
        let mut rows = self.rows_from();
        exclusive_prefix_sum(&mut rows);
        rows
    }
}

fn view<'a>(data: &'a [i32], shape: &[usize]) -> Tensor<'a> {
    Tensor::new(data, shape).expect("a handle's tensors have the shapes it was made with")
}

impl fmt::Debug for DispatchHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DispatchHandle")
            .field("rank", &self.rank())
            .field("num_ranks", &self.num_ranks())
            .field("num_tokens", &self.num_tokens())
            .field("num_recv_rows", &self.num_recv_rows())
            .finish()
    }
}

/// The routes of a low-latency dispatch; it may be combined several times.
#[derive(Debug, Clone)]
pub struct LowLatencyHandle(Arc<LowLatencyData>);

#[derive(Debug)]
struct LowLatencyData {
    src_info: OwnedTensor,
    layout_range: OwnedTensor,
    max_tokens_per_rank: usize,
    hidden: usize,
    num_experts: usize,
}

impl LowLatencyHandle {
    /// A handle from the tensors that one consists of.
    ///
    /// `src_info` `[E/R, R*M]` i32 holds the token index at its source, `layout_range` `[E/R, R]`
    /// i64 the begin row in the high and the count in the low 32 bits.
    ///
    /// # Errors
    /// Shapes or types do not fit each other, or a range reaches beyond `R*M` rows or `M` tokens.
    pub fn from_parts(
        src_info: Tensor<'_>,
        layout_range: Tensor<'_>,
        max_tokens_per_rank: usize,
        hidden: usize,
        num_experts: usize,
    ) -> Result<Self> {
        let &[local, ranks] = layout_range.shape() else {
            return Err(Error::invalid(
                "layout_range",
                format!("{layout_range:?}"),
                "must be [E/R, R]",
            ));
        };
        let rows = ranks.checked_mul(max_tokens_per_rank).ok_or_else(|| {
            Error::invalid(
                "num_max_dispatch_tokens_per_rank",
                max_tokens_per_rank,
                format!("must fit src_info {src_info:?} for {ranks} ranks"),
            )
        })?;
        if src_info.shape() != [local, rows] || num_experts != local * ranks {
            return Err(Error::invalid(
                "src_info",
                format!("{src_info:?}"),
                format!("must be i32 [{local}, {rows}] for {num_experts} experts on {ranks} ranks"),
            ));
        }
        let (info, ranges) = (src_info.as_slice::<i32>()?, layout_range.as_slice::<i64>()?);
        for (at, &range) in ranges.iter().enumerate() {
            let (begin, count) = unpack_range(range);
            let fits = count <= max_tokens_per_rank
                && begin + count <= rows
                && info[at / ranks * rows..][begin..begin + count]
                    .iter()
                    .all(|&token| (token as usize) < max_tokens_per_rank);
            if !fits {
                return Err(Error::invalid(
                    format!("layout_range[{}, {}]", at / ranks, at % ranks),
                    format!("{count} rows from {begin}"),
                    format!("must stay within {rows} rows of tokens below {max_tokens_per_rank}"),
                ));
            }
        }
        let mut copy = Self::empty(local, ranks, max_tokens_per_rank, hidden)?;
        let data = Arc::get_mut(&mut copy.0).expect("just made");
        data.src_info.as_mut_slice::<i32>()?.copy_from_slice(info);
        data.layout_range
            .as_mut_slice::<i64>()?
            .copy_from_slice(ranges);
        Ok(copy)
    }

    /// A handle from device tensors: `src_info` `[E/R, R*M]` i32 and `layout_range` `[E/R, R]` i64.
    ///
    /// # Errors
    /// Shapes or types do not fit each other, a tensor is not dense, or they lie on different
    /// devices. Contents are not looked at.
    pub fn from_device_parts(
        src_info: OwnedTensor,
        layout_range: OwnedTensor,
        max_tokens_per_rank: usize,
        hidden: usize,
    ) -> Result<Self> {
        let (info, range) = (src_info.as_tensor(), layout_range.as_tensor());
        let fits = range.dtype() == DType::I64
            && range.shape().len() == 2
            && info.dtype() == DType::I32
            && range.shape()[1]
                .checked_mul(max_tokens_per_rank)
                .is_some_and(|rows| info.shape() == [range.shape()[0], rows])
            && info.is_dense()
            && range.is_dense()
            && info.device() == range.device()
            && info.device() != Device::Host;
        if !fits {
            return Err(Error::invalid(
                "src_info",
                format!("{info:?} with layout_range {range:?}"),
                format!(
                    "must be dense i32 [E/R, R*{max_tokens_per_rank}] and i64 [E/R, R] on one device"
                ),
            ));
        }
        let num_experts = range.shape()[0] * range.shape()[1];
        Ok(Self(Arc::new(LowLatencyData {
            src_info,
            layout_range,
            max_tokens_per_rank,
            hidden,
            num_experts,
        })))
    }

    /// Where its tensors lie.
    pub fn device(&self) -> Device {
        self.0.src_info.device()
    }

    pub(crate) fn empty(
        local: usize,
        ranks: usize,
        max_tokens: usize,
        hidden: usize,
    ) -> Result<Self> {
        Ok(Self(Arc::new(LowLatencyData {
            src_info: OwnedTensor::zeros(DType::I32, &[local, ranks * max_tokens])?,
            layout_range: OwnedTensor::zeros(DType::I64, &[local, ranks])?,
            max_tokens_per_rank: max_tokens,
            hidden,
            num_experts: local * ranks,
        })))
    }

    /// The same handle for rows of another hidden size.
    pub(crate) fn with_hidden(mut self, hidden: usize) -> Self {
        if let Some(data) = Arc::get_mut(&mut self.0) {
            data.hidden = hidden;
        }
        self
    }

    /// `(src_info, layout_range)` of a handle that has no clone yet.
    pub(crate) fn tables_mut(&mut self) -> (&mut [i32], &mut [i64]) {
        let data = Arc::get_mut(&mut self.0).expect("a handle is filled before it is cloned");
        (
            data.src_info.as_mut_slice().expect("made as dense i32"),
            data.layout_range.as_mut_slice().expect("made as dense i64"),
        )
    }

    /// `[E/R, R*M]` i32: token index at its source of each row.
    pub fn src_info(&self) -> Tensor<'_> {
        self.0.src_info.as_tensor()
    }

    /// `[E/R, R]` i64: begin row in the high, count in the low 32 bits.
    pub fn layout_range(&self) -> Tensor<'_> {
        self.0.layout_range.as_tensor()
    }

    /// `M`.
    pub fn max_tokens_per_rank(&self) -> usize {
        self.0.max_tokens_per_rank
    }

    /// `H` of the dispatched rows; a combine may use another.
    pub fn hidden(&self) -> usize {
        self.0.hidden
    }

    /// `E`.
    pub fn num_experts(&self) -> usize {
        self.0.num_experts
    }

    /// Begin row and count of the rows of local expert `e` from source `s`.
    pub(crate) fn range(&self, e: usize, s: usize) -> (usize, usize) {
        let ranks = self.0.layout_range.shape()[1];
        unpack_range(
            self.0
                .layout_range
                .as_slice::<i64>()
                .expect("made as dense i64")[e * ranks + s],
        )
    }
}

/// `layout_range` entry of `count` rows from `begin`.
pub(crate) fn pack_range(begin: usize, count: usize) -> i64 {
    ((begin as u64) << 32 | count as u64) as i64
}

fn unpack_range(range: i64) -> (usize, usize) {
    (
        (range as u64 >> 32) as usize,
        (range as u64 & 0xffff_ffff) as usize,
    )
}

//! Handles: the routes of a dispatch, for the calls that follow it.

use deep_ep::{DeviceRoutes, DispatchHandle, LowLatencyHandle, OwnedTensor, Rank, ReceivedCounts};

use crate::{
    boundary,
    objects::{self, Object},
    pointers::{self, Out, OutStruct, Versioned},
    status::Status,
    tensor::TensorView,
};

/// The routes of a high-throughput dispatch.
pub struct HandleObject {
    pub(crate) handle: DispatchHandle,
    /// What came with it, which C has pointers to.
    pub(crate) counts: Option<ReceivedCounts>,
}

impl Object for HandleObject {
    const NAME: &'static str = "deep_ep_handle_t";
}

/// The routes of a low-latency dispatch.
pub struct LowLatencyHandleObject {
    pub(crate) handle: LowLatencyHandle,
    /// What came with it, which C has a view of.
    pub(crate) _recv_count: Option<OwnedTensor>,
}

impl Object for LowLatencyHandleObject {
    const NAME: &'static str = "deep_ep_low_latency_handle_t";
}

/// The tensors and numbers of a handle. Made by `deep_ep_handle_tensors()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HandleTensors {
    /// Set by `deep_ep_handle_tensors()`.
    pub struct_size: usize,
    /// The rank that it is of.
    pub rank: usize,
    /// Number of ranks, `R`. Not read.
    pub num_ranks: usize,
    /// Tokens of this rank, `T`. Not read.
    pub num_tokens: usize,
    /// Rows that this rank received, `N`; on a GPU the rows of the outputs. Not read.
    pub num_recv_tokens: usize,
    /// int32 `[R, R]`: element `[s, rank]` is the inclusive prefix over source ranks of rows received
    /// from s.
    pub rank_prefix_matrix: TensorView,
    /// int32 `[R, 1]`: rows sent to each rank. On the host not read.
    pub channel_prefix_matrix: TensorView,
    /// int32 `[R, 1]`: zeros. On the host not read.
    pub recv_channel_prefix_matrix: TensorView,
    /// int32 `[N]`, or as many as worst-case outputs have rows: source token of each received row.
    pub recv_src_idx: TensorView,
    /// uint8 `[T, R]`: 0 or 1.
    pub is_token_in_rank: TensorView,
    /// int32 `[T, R]`: position of the token among the rows that went to the rank, -1 where it did not
    /// go. On the host not read.
    pub send_head: TensorView,
}

// SAFETY: see the trait; all zeros are numbers and no tensors.
unsafe impl Versioned for HandleTensors {
    const NAME: &'static str = "deep_ep_handle_tensors_t";
}

/// A handle from its tensors, which on the host are copied; on a GPU the caller keeps them until the
/// handle is freed, and their contents are not looked at. Valid on any buffer with the same rank and
/// group. Local. `*handle` is the caller's to free. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_handle_from_tensors(
    tensors: *const HandleTensors,
    handle: *mut *mut HandleObject,
) -> Status {
    boundary::call(|| {
        let out = Out::new(handle, "handle")?;
        let from = pointers::read(tensors, "tensors")?;
        let rank = Rank(from.rank);
        let (prefix, source) = (from.rank_prefix_matrix, from.recv_src_idx);
        let handle = if from.is_token_in_rank.on_device() {
            DispatchHandle::from_device_parts(DeviceRoutes {
                rank,
                rank_prefix_matrix: prefix.lasting("rank_prefix_matrix")?,
                channel_prefix_matrix: from
                    .channel_prefix_matrix
                    .lasting("channel_prefix_matrix")?,
                recv_channel_prefix_matrix: from
                    .recv_channel_prefix_matrix
                    .lasting("recv_channel_prefix_matrix")?,
                recv_src_idx: source.lasting("recv_src_idx")?,
                is_token_in_rank: from.is_token_in_rank.lasting("is_token_in_rank")?,
                send_head: from.send_head.lasting("send_head")?,
                remote_rows: None,
            })?
        } else {
            DispatchHandle::from_parts(
                rank,
                prefix.read("rank_prefix_matrix")?,
                source.read("recv_src_idx")?,
                from.is_token_in_rank.read("is_token_in_rank")?,
            )?
        };
        out.set(objects::give(HandleObject {
            handle,
            counts: None,
        }));
        Ok(())
    })
}

/// The tensors of a handle, which live as long as it does. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_handle_get_tensors(
    handle: *const HandleObject,
    tensors: *mut HandleTensors,
) -> Status {
    boundary::call(|| {
        let out = OutStruct::new(tensors, "tensors")?;
        let handle = &objects::get(handle, "handle")?.handle;
        out.set(HandleTensors {
            struct_size: size_of::<HandleTensors>(),
            rank: handle.rank().0,
            num_ranks: handle.num_ranks(),
            num_tokens: handle.num_tokens(),
            num_recv_tokens: handle.num_recv_rows(),
            rank_prefix_matrix: TensorView::of(&handle.rank_prefix_matrix()),
            channel_prefix_matrix: TensorView::of(&handle.channel_prefix_matrix()),
            recv_channel_prefix_matrix: TensorView::of(&handle.recv_channel_prefix_matrix()),
            recv_src_idx: TensorView::of(&handle.recv_src_idx()),
            is_token_in_rank: TensorView::of(&handle.is_token_in_rank()),
            send_head: TensorView::of(&handle.send_head()),
        });
        Ok(())
    })
}

/// Frees a handle; a call that was begun with it keeps it. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_handle_free(handle: *mut HandleObject) -> Status {
    boundary::call(|| objects::take(handle, "handle"))
}

/// The tensors and numbers of a low-latency handle. Made by `deep_ep_low_latency_handle_tensors()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyHandleTensors {
    /// Set by `deep_ep_low_latency_handle_tensors()`.
    pub struct_size: usize,
    /// `M`.
    pub num_max_dispatch_tokens_per_rank: usize,
    /// `H` of the dispatched rows; a combine may use another.
    pub hidden: usize,
    /// `E`.
    pub num_experts: usize,
    /// int32 `[E/R, R*M]`: token index at its source of each row.
    pub src_info: TensorView,
    /// int64 `[E/R, R]`: first row of each source in the high, number of rows in the low 32 bits.
    pub layout_range: TensorView,
}

// SAFETY: see the trait; all zeros are numbers and no tensors.
unsafe impl Versioned for LowLatencyHandleTensors {
    const NAME: &'static str = "deep_ep_low_latency_handle_tensors_t";
}

/// A low-latency handle from its tensors, which on the host are copied; on a GPU the caller keeps them
/// until the handle is freed, and their contents are not looked at. Local. `*handle` is the caller's
/// to free. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_handle_from_tensors(
    tensors: *const LowLatencyHandleTensors,
    handle: *mut *mut LowLatencyHandleObject,
) -> Status {
    boundary::call(|| {
        let out = Out::new(handle, "handle")?;
        let from = pointers::read(tensors, "tensors")?;
        let (max, hidden) = (from.num_max_dispatch_tokens_per_rank, from.hidden);
        let handle = if from.src_info.on_device() {
            LowLatencyHandle::from_device_parts(
                from.src_info.lasting("src_info")?,
                from.layout_range.lasting("layout_range")?,
                max,
                hidden,
            )?
        } else {
            LowLatencyHandle::from_parts(
                from.src_info.read("src_info")?,
                from.layout_range.read("layout_range")?,
                max,
                hidden,
                from.num_experts,
            )?
        };
        out.set(objects::give(LowLatencyHandleObject {
            handle,
            _recv_count: None,
        }));
        Ok(())
    })
}

/// The tensors of a low-latency handle, which live as long as it does. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_handle_get_tensors(
    handle: *const LowLatencyHandleObject,
    tensors: *mut LowLatencyHandleTensors,
) -> Status {
    boundary::call(|| {
        let out = OutStruct::new(tensors, "tensors")?;
        let handle = &objects::get(handle, "handle")?.handle;
        out.set(LowLatencyHandleTensors {
            struct_size: size_of::<LowLatencyHandleTensors>(),
            num_max_dispatch_tokens_per_rank: handle.max_tokens_per_rank(),
            hidden: handle.hidden(),
            num_experts: handle.num_experts(),
            src_info: TensorView::of(&handle.src_info()),
            layout_range: TensorView::of(&handle.layout_range()),
        });
        Ok(())
    })
}

/// Frees a low-latency handle; a call that was begun with it keeps it. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_handle_free(
    handle: *mut LowLatencyHandleObject,
) -> Status {
    boundary::call(|| objects::take(handle, "handle"))
}

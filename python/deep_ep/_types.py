"""What the native module takes; the Rust side is in crates/deep-ep-python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, TypedDict

if TYPE_CHECKING:
    from ._native import Loan

#: A tensor: address, element type, shape, strides in elements, and -1 for the host or the ordinal of a
#: CUDA device.
Spec = tuple[int, str, tuple[int, ...], tuple[int, ...], int]

#: The tensors of a high-throughput handle, in its order.
Handle = tuple[Spec, Spec, Spec, Spec, Spec, Spec]


class Settings(TypedDict):
    """What a buffer is made with."""

    scale_up_bytes: int
    low_latency_bytes: Optional[int]
    num_sms: int
    enable_shrink: bool
    device: Optional[int]


class DispatchArguments(TypedDict):
    """Arguments of a dispatch."""

    x: Spec
    scales: Optional[Spec]
    layout: Optional[tuple[Spec, Spec, Spec]]
    handle: Optional[Handle]
    topk_idx: Optional[Spec]
    topk_weights: Optional[Spec]
    expert_alignment: int
    num_worst_tokens: Optional[int]
    num_sms: int
    loan: bool
    keep: object
    stream: int


class CombineArguments(TypedDict):
    """Arguments of a combine, outputs included."""

    x: Spec
    handle: Handle
    topk_weights: Optional[Spec]
    bias: tuple[Optional[Spec], Optional[Spec]]
    combined_x: Spec
    combined_topk_weights: Optional[Spec]
    num_sms: int
    keep: object
    stream: int


#: ``src_info``, ``layout_range``, ``M``, ``H``, ``E``.
LowLatencyHandle = tuple[Spec, Spec, int, int, int]


class LowLatencyDispatchArguments(TypedDict):
    """Arguments of a low-latency dispatch."""

    x: Spec
    topk_idx: Spec
    max_tokens_per_rank: int
    num_experts: int
    recv_stats: Optional[Spec]
    wait_stats: Optional[Spec]
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    at_once: bool
    stream: int


class LowLatencyCombineArguments(TypedDict):
    """Arguments of a low-latency combine."""

    x: Spec
    loan: Optional[Loan]
    topk_idx: Spec
    topk_weights: Spec
    handle: LowLatencyHandle
    use_logfmt: bool
    at_once: bool
    wait_stats: Optional[Spec]
    out: Spec
    stream: int

"""The native module: see crates/deep-ep-python."""

from collections.abc import Callable
from typing import Any, Optional, TypedDict, final

Spec = tuple[int, str, tuple[int, ...], tuple[int, ...], int]

__version__: str

class Settings(TypedDict):
    scale_up_bytes: int
    low_latency_bytes: Optional[int]
    num_sms: int
    enable_shrink: bool
    device: Optional[int]

class DispatchArguments(TypedDict):
    x: Spec
    scales: Optional[Spec]
    layout: Optional[tuple[Spec, Spec, Spec]]
    handle: Optional[tuple[Spec, Spec, Spec]]
    topk_idx: Optional[Spec]
    topk_weights: Optional[Spec]
    expert_alignment: int
    num_worst_tokens: Optional[int]
    num_sms: int
    stream: int

class CombineArguments(TypedDict):
    x: Spec
    handle: tuple[Spec, Spec, Spec]
    topk_weights: Optional[Spec]
    bias: tuple[Optional[Spec], Optional[Spec]]
    combined_x: Spec
    combined_topk_weights: Optional[Spec]
    num_sms: int
    stream: int

LowLatencyHandle = tuple[Spec, Spec, int, int, int]

class LowLatencyDispatchArguments(TypedDict):
    x: Spec
    topk_idx: Spec
    max_tokens_per_rank: int
    num_experts: int
    recv_stats: Optional[Spec]
    wait_stats: Optional[Spec]
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    stream: int

class LowLatencyCombineArguments(TypedDict):
    x: Spec
    loan: Optional[Loan]
    topk_idx: Spec
    topk_weights: Spec
    handle: LowLatencyHandle
    use_logfmt: bool
    wait_stats: Optional[Spec]
    out: Spec
    stream: int

@final
class Group:
    @staticmethod
    def from_env() -> Group: ...
    @staticmethod
    def local(n: int) -> list[Group]: ...
    @staticmethod
    def from_all_gather(rank: int, size: int, all_gather: Callable[[bytes], list[bytes]]) -> Group: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def local_rank(self) -> int: ...
    @property
    def in_process(self) -> bool: ...
    def all_gather(self, data: bytes) -> list[bytes]: ...
    def barrier(self) -> None: ...
    def cancel(self) -> None: ...

@final
class Memory:
    @property
    def spec(self) -> Spec: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Optional[Any] = None,
        max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...

@final
class Loan:
    def memory(self) -> Memory: ...

@final
class Foreign:
    @property
    def spec(self) -> Spec: ...
    @property
    def read_only(self) -> bool: ...

def from_dlpack(tensor: Any, stream: Optional[int] = None) -> Foreign: ...
def empty(
    dtype_name: str, shape: tuple[int, ...], strides: Optional[tuple[int, ...]] = None
) -> Memory: ...
def low_latency_bytes(
    max_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int: ...

@final
class PendingLowLatencyDispatch:
    def finish(self, x: Spec, scales: Optional[Spec]) -> tuple[Memory, Memory, Memory]: ...

@final
class PendingLowLatencyCombine:
    def finish(self, out: Spec) -> None: ...

@final
class Buffer:
    def __new__(cls, group: Group, settings: Settings) -> Buffer: ...
    @property
    def engine(self) -> str: ...
    def refuse(self, call: str, argument: str, value: str, limit: str) -> None: ...
    def layout(
        self, topk_idx: Spec, num_experts: int
    ) -> tuple[Memory, Optional[Memory], Memory, Memory]: ...
    def dispatch(
        self,
        arguments: DispatchArguments,
        allocate: Callable[[int], tuple[Optional[Spec], ...]],
    ) -> tuple[list[int], Optional[list[Memory]]]: ...
    def combine(self, arguments: CombineArguments) -> None: ...
    def low_latency_dispatch(
        self, arguments: LowLatencyDispatchArguments, keep: object
    ) -> PendingLowLatencyDispatch: ...
    def low_latency_combine(
        self, arguments: LowLatencyCombineArguments, keep: object
    ) -> PendingLowLatencyCombine: ...
    def low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Loan: ...
    def loan(self, dtype_name: str, shape: list[int]) -> Loan: ...
    def barrier(self) -> None: ...
    def reserve(self, bytes: int) -> None: ...
    def set_mask(self, rank: int, masked: bool) -> None: ...
    def masks(self) -> list[bool]: ...
    def clear_masks(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...

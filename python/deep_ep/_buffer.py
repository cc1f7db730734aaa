"""DeepEP's ``Buffer``."""

from __future__ import annotations

import os
import warnings
from typing import Any, Optional

from . import _arrays, _native, _streams
from ._config import Config
from ._group import adapt
from ._high_throughput import HighThroughput
from ._low_latency import LowLatency
from ._types import Settings, Spec
from .errors import InvalidArgument
from .utils import EventHandle, EventOverlap


class Runtime:
    """What callers of DeepEP look at in ``Buffer.runtime``."""

    def __init__(self, native: _native.Buffer, device: int) -> None:
        self.native = native
        self._device = device

    @property
    def engine(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.native.engine

    def is_available(self) -> bool:
        """Whether calls can be made."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """The number of nodes."""
        return 1

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return 0

    def get_root_rdma_rank(self, global_: bool) -> int:
        """The first rank of this rank's rail, among all ranks or among nodes."""
        return 0

    def get_local_device_id(self) -> int:
        """Ordinal of this rank's GPU; without GPUs its number on its host."""
        return self._device


class Buffer(HighThroughput, LowLatency):
    """Moves rows between the ranks of a group.

    Making one is collective, and so are its calls: every rank makes the same calls in the same order.
    It may be used from several threads, one at a time. Dropping it frees everything at once, without
    the other ranks.

    Attributes:
        num_sms: default bound on the SMs of high-throughput calls (threads on the CPU engine).
        rank: this rank.
        group: what was passed.
        group_size: the number of ranks, ``R``.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink: as passed.
        runtime: see :class:`Runtime`; ``None`` after :meth:`destroy`.
    """

    num_sms: int = 20
    _live: Optional[Runtime] = None

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        """Makes a buffer. Collective.

        Args:
            group: a ``torch.distributed`` group (any backend; only small objects travel over it), an
                mpi4py communicator, or a :class:`deep_ep.Group`; with ``None``, ``comm`` is used.
            num_nvl_bytes: bytes to start with for the high-throughput calls; memory grows.
            num_rdma_bytes: with ``low_latency_mode``, memory of the low-latency calls, as
                :meth:`get_low_latency_rdma_size_hint` computes it; fixed.
            low_latency_mode: whether there are low-latency calls, too.
            explicitly_destroy: whether :meth:`destroy` will be called.
            enable_shrink: in low-latency calls, mask a rank that does not come instead of failing.
            comm: an object with ``Get_rank``, ``Get_size`` and ``allgather``.
            num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: accepted
                without effect.

        Raises:
            deep_ep.SettingsDiffer: ranks passed different values where they must agree.
        """
        self._bootstrap, self.group = adapt(group, comm)
        self.rank = self._bootstrap.rank()
        self.group_size = self._bootstrap.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        device = None
        if os.environ.get("DEEP_EP_ENGINE", "").strip() != "cpu":
            device = _streams.current_device()
        settings: Settings = {
            "scale_up_bytes": num_nvl_bytes,
            "low_latency_bytes": num_rdma_bytes if low_latency_mode else None,
            "num_sms": max(Buffer.num_sms, 1),
            "enable_shrink": enable_shrink,
            "device": device,
        }
        native = _native.Buffer(self._bootstrap, settings)
        local = self._bootstrap.local_rank() if device is None else device
        self._live = Runtime(native, local)
        self._host = _streams.HostTimeline()
        self._cuda: Optional[_streams.CudaTimeline] = None
        if native.engine == "cuda" and device is not None:
            self._cuda = _streams.CudaTimeline(device, native)
        self._local_memory: dict[bool, _native.Loan] = {}

    @property
    def runtime(self) -> Optional[Runtime]:
        """Whether the buffer is there, and where; ``None`` after :meth:`destroy`."""
        return self._live

    @property
    def _core(self) -> _native.Buffer:
        if self._live is None:
            raise InvalidArgument(
                "the buffer is destroyed, but it must be there",
                argument="the buffer",
                value="destroyed",
                limit="must be there",
            )
        return self._live.native

    @property
    def _lends(self) -> bool:
        return self._core.engine == "cpu"

    def _timeline(self, x: Spec) -> _streams.Timeline:
        # The CUDA engine copies host tensors, and waits for itself.
        device = x[4]
        if device < 0 or self._core.engine != "cuda":
            return self._host
        if self._cuda is None:
            # Torch was imported after the buffer was made.
            self._cuda = _streams.CudaTimeline(device, self._core)
        return self._cuda

    def destroy(self) -> None:
        """Frees everything. Needs ``explicitly_destroy``; not collective."""
        if not self.explicitly_destroy:
            raise InvalidArgument(
                "explicitly_destroy is False, but it must be True for destroy()",
                argument="explicitly_destroy",
                value=False,
                limit="must be True for destroy()",
            )
        self._live = self._cuda = self._next_combine = None
        self._local_memory.clear()

    def __del__(self) -> None:
        if self._live is not None and self.explicitly_destroy:
            warnings.warn("a Buffer was dropped without destroy()", ResourceWarning, stacklevel=2)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether features of SM90 (FP8, low-latency) are there: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the default bound on SMs of the high-throughput calls; must be even."""
        if new_num_sms % 2 or new_num_sms < 2:
            raise InvalidArgument(
                f"new_num_sms is {new_num_sms}, but it must be even and at least 2",
                argument="new_num_sms",
                value=new_num_sms,
                limit="must be even and at least 2",
            )
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Settings of a dispatch among ``num_ranks`` ranks, any number."""
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Settings of a combine among ``num_ranks`` ranks, any number."""
        return Config(Buffer.num_sms, 4, 256, 6, 128)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """``num_rdma_bytes`` for low-latency calls of these sizes."""
        return _native.low_latency_bytes(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def get_comm_stream(self) -> Any:
        """The communication stream, always the same."""
        return (self._cuda or self._host).comm_stream

    def get_local_buffer_tensor(
        self,
        dtype: Any,
        size: Optional[Any] = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Any:
        """This rank's memory as a flat tensor, for callers that clear or inspect it.

        Args:
            dtype: element type (torch or numpy).
            size: shape (a ``torch.Size``) of the result; else all elements.
            offset: where to begin, in bytes.
            use_rdma_buffer: ``num_rdma_bytes`` of memory instead of ``num_nvl_bytes``.

        Control words do not live there; the first use allocates it.
        """
        total = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        loan = self._local_memory.get(use_rdma_buffer)
        if loan is None:
            loan = self._local_memory[use_rdma_buffer] = self._core.loan("uint8", [total])
        (self._cuda or self._host).lend(loan)
        arrays = _arrays.of_dtype(dtype)
        flat = arrays.of_memory(loan.memory())[offset:]
        item = arrays.item(flat[:0].view(dtype))
        flat = flat[: flat.shape[0] // item * item].view(dtype)
        if size is None:
            return flat
        count = 1
        for n in size:
            count *= n
        return flat[:count].reshape(tuple(size))

    def statistics(self) -> dict[str, int]:
        """Bytes copied and memory used so far on this rank (an extension)."""
        return self._core.statistics()

    def check(self) -> None:
        """Raises what went wrong on this rank in calls that did not wait, once (an extension).

        On a GPU a call that does not wait for its counts returns before its work is done: call this
        after the stream was synchronised.
        """
        self._core.check()

    def barrier(self) -> None:
        """Waits for all ranks (an extension). Collective."""
        self._core.barrier()

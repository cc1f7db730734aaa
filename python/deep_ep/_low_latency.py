"""Low-latency dispatch and combine."""

from __future__ import annotations

from typing import Any, Callable, Optional

from . import _native, _streams
from ._arrays import Arrays
from ._calls import Arguments, Calls
from ._types import LowLatencyCombineArguments, LowLatencyDispatchArguments, Spec
from .utils import EventOverlap

#: Elements of a handle.
HANDLE = (
    "src_info",
    "layout_range",
    "num_max_dispatch_tokens_per_rank",
    "hidden",
    "num_experts",
)

#: The receive half of a call.
Hook = Callable[[], None]
#: ``[E/R, R*M, H]`` rows, or FP8 rows and their scales.
Rows = Any


class Arrival:
    """Outputs of a low-latency dispatch."""

    def __init__(self, arrays: Arrays, like: Any, sizes: tuple[int, int, int], format: str) -> None:
        """``sizes`` are local experts, rows of each, hidden; ``format`` bf16, f32 or ue8m0."""
        self.arrays, self.like = arrays, like
        local, rows, hidden = self.sizes = sizes
        self.scales: Any = None
        if format == "bf16":
            self.x = arrays.empty(sizes, arrays.named("bfloat16"), like)
            return
        self.x = arrays.empty(sizes, arrays.named("float8_e4m3fn"), like)
        columns, dtype = (hidden // 128, "float32") if format == "f32" else (hidden // 512, "int32")
        # Neighbouring rows lie next to each other; columns begin at multiples of 16 bytes.
        apart = -(-rows // 4) * 4
        strides = (columns * apart, 1, apart)
        self.scales = arrays.empty((local, rows, columns), arrays.named(dtype), like, strides)

    def specs(self) -> tuple[Spec, Optional[Spec]]:
        """Descriptions of rows and scales."""
        arrays = self.arrays
        return arrays.spec(self.x), None if self.scales is None else arrays.spec(self.scales)

    def later(self, pending: _native.PendingLowLatencyDispatch, ranks: int) -> tuple[list[Any], Hook]:
        """``recv_count``, ``src_info`` and ``layout_range``, which the hook fills with the rest."""
        known = pending.tables()
        if known is not None:

            def receive() -> None:
                pending.finish(*self.specs())

            return list(map(self.arrays.of_memory, known)), receive
        arrays, like, (local, rows, _) = self.arrays, self.like, self.sizes
        tables = (
            arrays.empty((local,), arrays.named("int32"), like),
            arrays.empty((local, rows), arrays.named("int32"), like),
            arrays.empty((local, ranks), arrays.named("int64"), like),
        )

        def hook() -> None:
            for to, memory in zip(tables, pending.finish(*self.specs())):
                arrays.copy(to, memory)

        return [arrays.wrap(table) for table in tables], hook

    def rows(self) -> Rows:
        """What the caller gets."""
        x = self.arrays.wrap(self.x)
        return x if self.scales is None else (x, self.arrays.wrap(self.scales))


class LowLatency(Calls):
    """Low-latency calls of :class:`deep_ep.Buffer`.

    ``R`` ranks, ``E`` experts, ``T`` tokens of this rank, ``M`` the most tokens of any rank, ``H``
    hidden, ``K`` choices of a token.
    """

    _next_combine: Optional[_native.Loan] = None

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """There is nothing to clean. With ``enable_shrink`` a barrier that masks absent ranks."""
        if self.enable_shrink:
            self._core.barrier()

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[Any] = None,
        dispatch_wait_recv_cost_stats: Optional[Any] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Any, tuple[Any, ...], EventOverlap, Optional[Hook]]:
        """Sends rows to the chosen experts, with a fixed capacity. Collective.

        Args:
            x: ``[T, H]`` bf16.
            topk_idx: ``[T, K]`` int64 or int32, chosen experts; negative: no choice.
            num_max_dispatch_tokens_per_rank: ``M``, the same on all ranks.
            num_experts: ``E``.
            cumulative_local_expert_recv_stats: int32 ``[E/R]``; received rows are added to it.
            dispatch_wait_recv_cost_stats: int64 ``[R]``; clock cycles waited for each source are
                added to it.
            use_fp8: rows arrive as FP8 E4M3 with a scale per 128 channels.
            round_scale: scales are powers of two.
            use_ue8m0: scales are packed exponents; needs ``round_scale``.
            async_finish: the current stream does not wait; the returned event does.
            return_recv_hook: only send; the returned hook receives.

        Returns:
            ``recv_x`` ``[E/R, R*M, H]`` bf16, or FP8 with scales ``[E/R, R*M, H/128]`` float32
            (``[E/R, R*M, H/512]`` int32 with ``use_ue8m0``), rows next to each other in memory; rows
            of an expert are packed, by source rank, then source token. ``recv_count`` int32
            ``[E/R]``; the handle; the event; the hook or ``None``. Outputs of a call with a hook are
            filled by the hook.
        """
        arguments = Arguments(self._core, "low_latency_dispatch")
        if use_ue8m0 and not round_scale:
            arguments.reject("use_ue8m0", True, "must come with round_scale")
        arrays, raw, spec = arguments.take("x", x)
        check_hook(arguments, arrays, async_finish, return_recv_hook)
        stats = cumulative_local_expert_recv_stats
        native: LowLatencyDispatchArguments = {
            "x": spec,
            "topk_idx": arguments.spec("topk_idx", topk_idx),
            "max_tokens_per_rank": arguments.count(HANDLE[2], num_max_dispatch_tokens_per_rank),
            "num_experts": arguments.count("num_experts", num_experts),
            "recv_stats": arguments.optional_output("cumulative_local_expert_recv_stats", stats),
            "wait_stats": arguments.optional_output(
                "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats
            ),
            "use_fp8": use_fp8,
            "round_scale": round_scale,
            "use_ue8m0": use_ue8m0,
            "at_once": not return_recv_hook,
            "stream": 0,
        }
        format = ("ue8m0" if use_ue8m0 else "f32") if use_fp8 else "bf16"
        self._next_combine = None
        call = self._begin(spec, async_finish, return_recv_hook)
        try:
            native["stream"] = call.stream
            pending = self._core.low_latency_dispatch(native, tuple(arguments.kept))
            most = native["max_tokens_per_rank"]
            sizes = (num_experts // self.group_size, self.group_size * most, spec[2][1])
            arrival = Arrival(arrays, raw, sizes, format)
            numbers = (most, sizes[2], num_experts)
            if return_recv_hook:
                (count, *tables), hook = arrival.later(pending, self.group_size)
                return arrival.rows(), count, (*tables, *numbers), EventOverlap(None), hook
            count, *tables = map(arrays.of_memory, pending.finish(*arrival.specs()))
            event = call.end(())
        finally:
            call.leave()
        event.extra_tensors = (*arguments.kept, arrival.x, arrival.scales, count, *tables)
        return arrival.rows(), count, (*tables, *numbers), event, None

    def _begin(self, x: Spec, async_finish: bool, hook: bool) -> _streams.Call:
        """Both halves of a call with a hook are on the current stream."""
        timeline = self._timeline(x)
        return timeline.begin_here() if hook else timeline.begin(None, async_finish, False)

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[Any] = None,
        combine_wait_recv_cost_stats: Optional[Any] = None,
    ) -> tuple[Any, EventOverlap, Optional[Hook]]:
        """Brings the experts' rows back to their owners, where they are weighted and summed.

        Args:
            x: ``[E/R, R*M, H]`` bf16, rows where dispatch put them. With ``zero_copy`` the rows are
                those in the tensor of :meth:`get_next_low_latency_combine_buffer`.
            topk_idx: ``[T, K]``, as passed to dispatch.
            topk_weights: ``[T, K]`` float32.
            handle: of the dispatch; ``H`` may be another.
            use_logfmt: about 10 bits per value on the wire.
            zero_copy: ``x`` is in the buffer for it already; excludes ``use_logfmt``.
            async_finish: the current stream does not wait; the returned event does.
            return_recv_hook: only send; the returned hook receives.
            out: ``[T, H]`` bf16 for the result.
            combine_wait_recv_cost_stats: int64 ``[R]``; clock cycles waited for each rank are added.

        Returns:
            ``combined_x`` ``[T, H]`` bf16 (``out`` if given), the event, and the hook or ``None``.
        """
        arguments = Arguments(self._core, "low_latency_combine")
        if zero_copy and use_logfmt:
            arguments.reject("use_logfmt", True, "must be False with zero_copy")
        if zero_copy and self._next_combine is None:
            limit = "must come after get_next_low_latency_combine_buffer"
            arguments.reject("zero_copy", True, limit)
        arrays, raw, spec = arguments.take("x", x)
        check_hook(arguments, arrays, async_finish, return_recv_hook)
        idx = arguments.spec("topk_idx", topk_idx)
        stats = combine_wait_recv_cost_stats
        if out is None:
            shape = (idx[2][0] if idx[2] else 0, spec[2][-1] if spec[2] else 0)
            combined = arguments.told(arrays.empty, shape, arrays.named("bfloat16"), raw)
            to = arrays.spec(combined)
            # The pending call keeps it, whatever the caller does with it before the hook.
            arguments.kept.append(combined)
        else:
            to = arguments.output("out", out)
        native: LowLatencyCombineArguments = {
            "x": spec,
            "loan": self._next_combine if zero_copy else None,
            "topk_idx": idx,
            "topk_weights": arguments.spec("topk_weights", topk_weights),
            "handle": handle_specs(arguments, handle),
            "use_logfmt": use_logfmt,
            "at_once": not return_recv_hook,
            "wait_stats": arguments.optional_output("combine_wait_recv_cost_stats", stats),
            "out": to,
            "stream": 0,
        }
        self._next_combine = None
        call = self._begin(spec, async_finish, return_recv_hook)
        try:
            native["stream"] = call.stream
            pending = self._core.low_latency_combine(native, tuple(arguments.kept))
            result = arrays.wrap(combined) if out is None else out

            def hook() -> None:
                pending.finish(to)

            if return_recv_hook:
                return result, EventOverlap(None), hook
            hook()
            event = call.end(())
        finally:
            call.leave()
        event.extra_tensors = (*arguments.kept, result)
        return result, event, None

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Any:
        """``[E/R, R*M, H]`` bf16 to be filled for the next call, a combine with ``zero_copy``."""
        arguments = Arguments(self._core, None)
        specs = handle_specs(arguments, handle)
        arrays = arguments.kind("handle (src_info)", handle[0])
        loan = self._next_combine = self._core.low_latency_combine_buffer(specs, arguments.kept)
        self._timeline(specs[0]).lend(loan)
        return arrays.of_memory(loan.memory())

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or takes it back. Needs ``enable_shrink``."""
        self._core.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Any) -> None:
        """Fills ``mask_status`` int32 ``[R]``: 1 for masked ranks. Needs ``enable_shrink``."""
        arguments = Arguments(self._core, None)
        masks = self._core.masks()
        shape = arguments.output("mask_status", mask_status)[2]
        if tuple(shape) != (len(masks),):
            arguments.reject("mask_status", tuple(shape), f"must be int32 [{len(masks)}]")
        arrays = arguments.kind("mask_status", mask_status)
        arrays.fill(mask_status, [int(masked) for masked in masks])

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all masks back. Needs ``enable_shrink``."""
        self._core.clear_masks()


def check_hook(arguments: Arguments, arrays: Arrays, async_finish: bool, hook: bool) -> None:
    """Whether a call may have a hook, if it is to have one."""
    if hook and async_finish:
        arguments.reject("async_finish", True, "must be False with return_recv_hook")
    if hook and not arrays.mutable:
        arguments.reject("return_recv_hook", True, "must be False unless tensors are torch's or numpy's")


def handle_specs(arguments: Arguments, handle: Any) -> tuple[Spec, Spec, int, int, int]:
    """A handle as the native module takes it."""
    info, layout, tokens, hidden, experts = arguments.handle(handle, HANDLE)
    of_info, of_layout = arguments.specs(("handle (src_info)", "handle (layout_range)"), (info, layout))
    return (
        of_info,
        of_layout,
        arguments.count("handle (num_max_dispatch_tokens_per_rank)", tokens),
        arguments.count("handle (hidden)", hidden),
        arguments.count("handle (num_experts)", experts),
    )

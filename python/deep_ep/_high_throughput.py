"""High-throughput dispatch and combine."""

from __future__ import annotations

from typing import Any, Optional, Union

from . import _native
from ._arrays import Arrays
from ._calls import Arguments, Calls, as_bytes
from ._config import Config
from ._types import CombineArguments, DispatchArguments, Handle, Spec
from .utils import EventOverlap

#: Elements of a handle.
HANDLE = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
    "send_head",
)

#: What they are called in errors.
IN_HANDLE = tuple(f"handle ({name})" for name in HANDLE)

#: Element types that combine takes.
SUMMABLE = ("bfloat16", "float16", "float32")

#: ``[T, H]`` rows, or FP8 rows and their scales.
Rows = Any


class Traveller:
    """A tensor that travels in a dispatch, and what arrives of it."""

    __slots__ = ("arrays", "arrived", "raw", "spec", "width")

    def __init__(self, arguments: Arguments, argument: str, tensor: Any) -> None:
        self.arrays: Arrays
        self.arrays, self.raw, spec = arguments.take(argument, tensor)
        self.spec = as_bytes(self.arrays, self.raw, spec)
        self.width = spec[2][-1] if spec[2] else 0
        self.arrived: Any = None

    def dtype(self) -> Any:
        """Element type."""
        return self.arrays.dtype(self.raw)

    def allocate(self, rows: int) -> Spec:
        """Makes the output and describes it."""
        arrays = self.arrays
        self.arrived = arrays.empty((rows, self.width), arrays.dtype(self.raw), self.raw)
        return as_bytes(arrays, self.arrived, arrays.spec(self.arrived))


class Travelling:
    """Everything that travels in a dispatch."""

    def __init__(self, arguments: Arguments, x: Any, scales: Any, idx: Any, weights: Any) -> None:
        self.arguments = arguments

        self.rows = Traveller(arguments, "x", x)
        self.all = (
            self.rows,
            None if scales is None else Traveller(arguments, "x[1] (scales)", scales),
            None if idx is None else Traveller(arguments, "topk_idx", idx),
            None if weights is None else Traveller(arguments, "topk_weights", weights),
        )
        if weights is not None and idx is None:
            arguments.reject("topk_weights", "given", "must come with topk_idx")

    def described(self) -> DispatchArguments:
        """The native module's arguments, as far as these tensors are concerned."""
        _, scales, idx, weights = self.all
        return {
            "x": self.rows.spec,
            "scales": None if scales is None else scales.spec,
            "layout": None,
            "handle": None,
            "topk_idx": None if idx is None else idx.spec,
            "topk_weights": None if weights is None else weights.spec,
            "expert_alignment": 1,
            "num_worst_tokens": None,
            "num_sms": 1,
            "loan": False,
            "keep": self.arguments.kept,
            "stream": 0,
        }

    def allocate(self, rows: int) -> tuple[Optional[Spec], ...]:
        """Makes the outputs, which have ``rows`` rows."""
        return tuple(None if each is None else each.allocate(rows) for each in self.all)

    def arrived(self, lent: Optional[list[Optional[_native.Memory]]]) -> list[Any]:
        """The outputs for the caller, in memory of the library if that was lent."""
        if lent is None:
            return [None if each is None else each.arrays.wrap(each.arrived) for each in self.all]
        return [
            None if each is None or memory is None else each.arrays.rows_of(memory, each.dtype())
            for each, memory in zip(self.all, lent)
        ]


def use_layout(
    arguments: Arguments, native: DispatchArguments, in_rank: Any, per_rank: Any, per_expert: Any
) -> None:
    """Routes that were computed before."""
    named = (
        ("is_token_in_rank", in_rank),
        ("num_tokens_per_rank", per_rank),
        ("num_tokens_per_expert", per_expert),
    )
    for name, tensor in named:
        if tensor is None:
            arguments.reject(name, None, "must be given when there is no handle")
    names, tensors = zip(*named)
    routes, ranks, experts = arguments.specs(names, tensors)
    native["layout"] = (routes, ranks, experts)


def use_handle(arguments: Arguments, native: DispatchArguments, handle: Any) -> None:
    """Routes of a handle. One of a worst-case dispatch gives as many rows again."""
    if native["topk_idx"] is not None or native["topk_weights"] is not None:
        arguments.reject("topk_idx", "given", "must be left out with a handle")
    specs = native["handle"] = handle_specs(arguments, handle)
    rows = specs[3][2][0] if specs[3][2] else 0
    native["num_worst_tokens"] = native["num_worst_tokens"] or rows or None


def handle_of(arrays: Arrays, parts: list[_native.Memory]) -> tuple[Any, ...]:
    """A handle: tensors that look into the library's memory."""
    prefix, channels, recv_channels, source, routes, head = parts
    of = arrays.of_memory
    return of(prefix), of(channels), of(recv_channels), of(source), of(routes, True), of(head)


class HighThroughput(Calls):
    """High-throughput calls of :class:`deep_ep.Buffer`.

    ``R`` ranks, ``E`` experts, ``T`` tokens of this rank, ``H`` hidden, ``K`` choices of a token,
    ``N`` received rows.
    """

    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Optional[Any], Any, Any, EventOverlap]:
        """Counts and routes of a batch. Local.

        Args:
            topk_idx: ``[T, K]`` int64 or int32, chosen experts; negative: no choice.
            num_experts: ``E``.
            previous_event: what to wait for instead of the current stream.
            async_finish: the current stream does not wait; the returned event does.
            allocate_on_comm_stream: outputs belong to the communication stream.

        Returns:
            ``num_tokens_per_rank`` int32 ``[R]``, ``num_tokens_per_rdma_rank`` (``None`` inside one
            node), ``num_tokens_per_expert`` int32 ``[E]``, ``is_token_in_rank`` bool ``[T, R]``, and
            the event.
        """
        arguments = Arguments(self._core, None)
        arrays, _, spec = arguments.take("topk_idx", topk_idx)
        previous = arguments.previous(previous_event, async_finish, allocate_on_comm_stream)
        call = self._timeline(spec).begin(previous, async_finish, allocate_on_comm_stream)
        try:
            ranks, nodes, experts, routes = self._core.layout(
                spec, arguments.count("num_experts", num_experts), call.stream
            )
            per_rank = arrays.of_memory(ranks)
            per_node = None if nodes is None else arrays.of_memory(nodes)
            per_expert = arrays.of_memory(experts)
            in_rank = arrays.of_memory(routes, boolean=True)
            event = call.end((topk_idx, per_rank, per_node, per_expert, in_rank))
        finally:
            call.leave()
        return per_rank, per_node, per_expert, in_rank, event

    def dispatch(
        self,
        x: Rows,
        handle: Optional[tuple[Any, ...]] = None,
        num_tokens_per_rank: Optional[Any] = None,
        num_tokens_per_rdma_rank: Optional[Any] = None,
        is_token_in_rank: Optional[Any] = None,
        num_tokens_per_expert: Optional[Any] = None,
        topk_idx: Optional[Any] = None,
        topk_weights: Optional[Any] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        Optional[Any],
        Optional[Any],
        Optional[list[int]],
        Optional[tuple[Any, ...]],
        EventOverlap,
    ]:
        """Sends each row to every rank that hosts one of its experts. Collective.

        Args:
            x: ``[T, H]`` of any element type with rows of a multiple of 16 bytes; or a pair of such
                rows with 1-byte elements and their scales, ``[T, S]`` of a 4-byte type.
            handle: of an earlier dispatch, whose routes are used again; then the counts and choices
                are left out.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert:
                as :meth:`get_dispatch_layout` returns them.
            topk_idx: ``[T, K]`` int64 or int32, chosen experts, travelling with the rows.
            topk_weights: ``[T, K]`` float32, travelling with the choices.
            expert_alignment: per-expert counts are rounded up to a multiple of it.
            num_worst_tokens: outputs have this many rows, and there is no wait for the count on the
                host; needs ``topk_idx``. More rows are an error.
            config: settings; default: those for the number of ranks.
            previous_event, async_finish, allocate_on_comm_stream: as in
                :meth:`get_dispatch_layout`.

        Returns:
            ``recv_x`` (``[N, H]``, or the pair), by source rank, then source token;
            ``recv_topk_idx`` ``[N, K]``, numbers of local experts, -1 for others;
            ``recv_topk_weights`` ``[N, K]``, 0 where the index is -1;
            ``num_recv_tokens_per_expert_list``, ``E/R`` counts, ``[]`` with ``num_worst_tokens``;
            the handle; the event. With a handle given, all but ``recv_x`` and the event are ``None``.
        """
        arguments = Arguments(self._core, "dispatch")
        previous = arguments.previous(previous_event, async_finish, allocate_on_comm_stream)
        data, scales = x if isinstance(x, tuple) else (x, None)
        if data is None:
            arguments.reject("x", None, "must be a tensor, or a pair of rows and scales")
        travelling = Travelling(arguments, data, scales, topk_idx, topk_weights)
        native = travelling.described()
        native["expert_alignment"] = arguments.count("expert_alignment", expert_alignment)
        native["num_worst_tokens"] = arguments.count("num_worst_tokens", num_worst_tokens) or None
        native["num_sms"] = arguments.count("num_sms", (config or self).num_sms)
        native["loan"] = self._lends and travelling.rows.arrays.mutable
        if handle is not None:
            use_handle(arguments, native, handle)
        else:
            use_layout(arguments, native, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)
        counts_given = (is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)
        inputs = (data, scales, topk_idx, topk_weights, *(handle or counts_given))
        call = self._timeline(travelling.rows.spec).begin(
            previous, async_finish, allocate_on_comm_stream
        )
        try:
            native["stream"] = call.stream
            counts, parts, lent = self._core.dispatch(native, travelling.allocate)
            recv_x, recv_scales, recv_idx, recv_weights = arrived = travelling.arrived(lent)
            made = None if parts is None else handle_of(travelling.rows.arrays, parts)
            event = call.end((*inputs, *arrived, *(made or ())))
        finally:
            call.leave()
        rows = recv_x if scales is None else (recv_x, recv_scales)
        if handle is not None:
            return rows, None, None, None, None, event
        return rows, recv_idx, recv_weights, counts, made, event

    def combine(
        self,
        x: Any,
        handle: tuple[Any, ...],
        topk_weights: Optional[Any] = None,
        bias: Union[Any, tuple[Any, Any], None] = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Optional[Any], EventOverlap]:
        """Brings rows back to their owners, where they are summed without weights. Collective.

        Args:
            x: ``[N, H]`` bf16 (or float32, float16) in the order of dispatch's rows; rows beyond
                ``N`` (of a worst-case dispatch) are ignored.
            handle: of the dispatch whose rows go back.
            topk_weights: ``[N, K]`` float32, summed per token, too.
            bias: ``[T, H]`` tensors that the sum starts with: none, one, or a pair.
            config: settings; default: those for the number of ranks.
            previous_event, async_finish, allocate_on_comm_stream: as in
                :meth:`get_dispatch_layout`.

        Returns:
            ``combined_x`` ``[T, H]``, summed in float32 in the order bias 0, bias 1, ranks ascending,
            and rounded once; ``combined_topk_weights`` float32 ``[T, K]`` or ``None``; the event.
        """
        arguments = Arguments(self._core, "combine")
        previous = arguments.previous(previous_event, async_finish, allocate_on_comm_stream)
        arrays, raw, spec = arguments.take("x", x)
        specs = handle_specs(arguments, handle)
        biases = bias if isinstance(bias, tuple) else (bias, None)
        if len(biases) != 2:
            arguments.reject("bias", f"a tuple of {len(biases)}", "must be a tensor or a pair")
        native: CombineArguments = {
            "x": spec,
            "handle": specs,
            "topk_weights": arguments.optional("topk_weights", topk_weights),
            "bias": (
                arguments.optional("bias", biases[0]),
                arguments.optional("bias", biases[1]),
            ),
            "combined_x": spec,
            "combined_topk_weights": None,
            "num_sms": arguments.count("num_sms", (config or self).num_sms),
            "keep": arguments.kept,
            "stream": 0,
        }
        call = self._timeline(spec).begin(previous, async_finish, allocate_on_comm_stream)
        try:
            native["stream"] = call.stream
            outputs = arguments.told(Combined, self._core, native, arrays, raw, self._lends)
            self._core.combine(native)
            combined, weights = outputs.wrapped()
            event = call.end((x, topk_weights, *biases, *handle, combined, weights))
        finally:
            call.leave()
        return combined, weights, event


class Combined:
    """Outputs of a combine."""

    def __init__(
        self,
        core: _native.Buffer,
        native: CombineArguments,
        arrays: Arrays,
        like: Any,
        lends: bool,
    ) -> None:
        """Makes the outputs and puts their descriptions into ``native``."""
        self.arrays, self.dtype = arrays, arrays.dtype(like)
        routes, rows, weights = native["handle"][4], native["x"], native["topk_weights"]
        tokens, width = routes[2][0] if routes[2] else 0, rows[2][-1] if rows[2] else 0
        self.memory: Optional[_native.Memory] = None
        self.x: Any = None
        if lends and arrays.mutable and rows[1] in SUMMABLE:
            # Memory of the library is used again: a fresh page costs more than summing a row into it.
            self.memory = core.loan(rows[1], [tokens, width]).memory()
            native["combined_x"] = self.memory.spec
        else:
            self.x = arrays.empty((tokens, width), self.dtype, like)
            native["combined_x"] = arrays.spec(self.x)
        self.weights: Any = None
        if weights is not None:
            columns = weights[2][-1] if weights[2] else 0
            self.weights = arrays.empty((tokens, columns), arrays.named("float32"), like)
            native["combined_topk_weights"] = arrays.spec(self.weights)

    def wrapped(self) -> tuple[Any, Any]:
        """Rows and weights for the caller."""
        arrays = self.arrays
        weights = None if self.weights is None else arrays.wrap(self.weights)
        if self.memory is not None:
            return arrays.rows_of(self.memory, self.dtype), weights
        return arrays.wrap(self.x), weights


def handle_specs(arguments: Arguments, handle: Any) -> Handle:
    """The tensors of a handle that the native module needs."""
    specs = arguments.specs(IN_HANDLE, arguments.handle(handle, HANDLE))
    prefix, channels, recv_channels, source, routes, head = specs
    return prefix, channels, recv_channels, source, routes, head

"""High-throughput dispatch and combine."""

from __future__ import annotations

from typing import Any, Optional, Union

from ._arrays import Arrays
from ._calls import Arguments, Calls, as_bytes
from ._config import Config
from ._types import CombineArguments, DispatchArguments, Spec
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

#: ``[T, H]`` rows, or FP8 rows and their scales.
Rows = Any


class Travelling:
    """A tensor that travels in a dispatch, and what arrives of it."""

    def __init__(self, arguments: Arguments, argument: str, tensor: Any) -> None:
        self.arrays: Arrays
        self.arrays, self.raw, spec = arguments.take(argument, tensor)
        self.spec = as_bytes(self.arrays, self.raw, spec)
        self.width = spec[2][-1] if spec[2] else 0
        self.arrived: Any = None

    def allocate(self, rows: int) -> Spec:
        """Makes the output and describes it."""
        arrays = self.arrays
        self.arrived = arrays.empty((rows, self.width), arrays.dtype(self.raw), self.raw)
        return as_bytes(arrays, self.arrived, arrays.spec(self.arrived))


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
        call = self._timeline.begin(previous, async_finish, allocate_on_comm_stream)
        try:
            ranks, nodes, experts, routes = self._core.layout(
                spec, arguments.count("num_experts", num_experts)
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
        travelling = [
            None if tensor is None else Travelling(arguments, name, tensor)
            for name, tensor in (
                ("x", data),
                ("x[1] (scales)", scales),
                ("topk_idx", topk_idx),
                ("topk_weights", topk_weights),
            )
        ]
        native = self._dispatch_arguments(arguments, travelling, config)
        native["expert_alignment"] = arguments.count("expert_alignment", expert_alignment)
        native["num_worst_tokens"] = arguments.count("num_worst_tokens", num_worst_tokens) or None
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                arguments.reject("topk_idx", "given", "must be left out with a handle")
            self._use_handle(arguments, native, handle)
        else:
            if topk_weights is not None and topk_idx is None:
                arguments.reject("topk_weights", "given", "must come with topk_idx")
            layout = {
                "is_token_in_rank": is_token_in_rank,
                "num_tokens_per_rank": num_tokens_per_rank,
                "num_tokens_per_expert": num_tokens_per_expert,
            }
            for name, tensor in layout.items():
                if tensor is None:
                    arguments.reject(name, None, "must be given when there is no handle")
            routes, ranks, experts = [arguments.spec(*named) for named in layout.items()]
            native["layout"] = (routes, ranks, experts)

        def allocate(rows: int) -> tuple[Optional[Spec], ...]:
            return tuple(None if each is None else each.allocate(rows) for each in travelling)

        call = self._timeline.begin(previous, async_finish, allocate_on_comm_stream)
        try:
            native["stream"] = call.stream
            counts, parts = self._core.dispatch(native, allocate)
            arrived = [None if each is None else each.arrays.wrap(each.arrived) for each in travelling]
            made = None
            if parts is not None and travelling[0] is not None:
                arrays = travelling[0].arrays
                made = tuple(
                    arrays.of_memory(part, boolean=name == "is_token_in_rank")
                    for name, part in zip(HANDLE, parts)
                )
            inputs = (data, scales, topk_idx, topk_weights, is_token_in_rank)
            event = call.end((*inputs, *arrived, *(made or ()), *(handle or ())))
        finally:
            call.leave()
        recv_x, recv_scales, recv_idx, recv_weights = arrived
        rows = recv_x if scales is None else (recv_x, recv_scales)
        if handle is not None:
            return rows, None, None, None, None, event
        return rows, recv_idx, recv_weights, counts, made, event

    def _dispatch_arguments(
        self,
        arguments: Arguments,
        travelling: list[Optional[Travelling]],
        config: Optional[Config],
    ) -> DispatchArguments:
        x, scales, idx, weights = [None if each is None else each.spec for each in travelling]
        if x is None:
            arguments.reject("x", None, "must be a tensor, or a pair of rows and scales")
        if config is None:
            config = self.get_dispatch_config(self.group_size)
        return {
            "x": x,
            "scales": scales,
            "layout": None,
            "handle": None,
            "topk_idx": idx,
            "topk_weights": weights,
            "expert_alignment": 1,
            "num_worst_tokens": None,
            "num_sms": arguments.count("num_sms", config.num_sms),
            "stream": 0,
        }

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Settings of a dispatch among ``num_ranks`` ranks."""
        raise NotImplementedError

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Settings of a combine among ``num_ranks`` ranks."""
        raise NotImplementedError

    @staticmethod
    def _use_handle(arguments: Arguments, native: DispatchArguments, handle: tuple[Any, ...]) -> None:
        """Routes of a handle. One of a worst-case dispatch gives as many rows again."""
        specs = handle_specs(arguments, handle)
        native["handle"] = specs
        rows = specs[1][2][0] if specs[1][2] else 0
        if native["num_worst_tokens"] is None and rows:
            native["num_worst_tokens"] = rows

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
        if config is None:
            config = self.get_combine_config(self.group_size)
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
            "num_sms": arguments.count("num_sms", config.num_sms),
            "stream": 0,
        }
        tokens = specs[2][2][0] if specs[2][2] else 0
        call = self._timeline.begin(previous, async_finish, allocate_on_comm_stream)
        try:
            native["stream"] = call.stream
            width = spec[2][-1] if spec[2] else 0
            combined = arrays.empty((tokens, width), arrays.dtype(raw), raw)
            native["combined_x"] = arrays.spec(combined)
            weights = None
            if native["topk_weights"] is not None:
                shape = native["topk_weights"][2]
                columns = shape[-1] if shape else 0
                weights = arrays.empty((tokens, columns), arrays.named("float32"), raw)
                native["combined_topk_weights"] = arrays.spec(weights)
            self._core.combine(native)
            combined = arrays.wrap(combined)
            weights = None if weights is None else arrays.wrap(weights)
            event = call.end((x, topk_weights, *biases, *handle, combined, weights))
        finally:
            call.leave()
        return combined, weights, event


def handle_specs(arguments: Arguments, handle: Any) -> tuple[Spec, Spec, Spec]:
    """The tensors of a handle that the native module needs."""
    elements = dict(zip(HANDLE, arguments.handle(handle, HANDLE)))
    prefix, source, routes = [
        arguments.spec(f"handle ({name})", elements[name])
        for name in ("rank_prefix_matrix", "recv_src_idx", "is_token_in_rank")
    ]
    return prefix, source, routes

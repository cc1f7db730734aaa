"""Errors have fields, are told to the peers, and leave the buffer usable."""

from __future__ import annotations

import pickle
from typing import Any, Callable

import numpy as np
import pytest

import deep_ep
import reference
from deep_ep import Buffer, Group, run_local
from kit import BF16
from test_high_throughput import layout
from test_low_latency import MOST, buffer_for

Break = Callable[[Any, dict[str, Any]], None]


def _set(**values: Any) -> Break:
    return lambda kit, arguments: arguments.update(
        {name: value(kit) if callable(value) else value for name, value in values.items()}
    )


@pytest.mark.parametrize(
    "argument,change",
    [
        ("x", _set(x=lambda kit: kit.tensor(np.zeros((3, 4), np.float32))[:, :3])),
        ("x", _set(x="rows")),
        ("x", _set(x=lambda kit: kit.tensor(np.zeros(16, np.float32)))),
        ("topk_idx", _set(topk_idx=lambda kit: kit.tensor(np.zeros((2, 2), np.float32)))),
        ("topk_weights", _set(topk_weights=lambda kit: kit.tensor(np.zeros((1, 1), np.float64)))),
        ("topk_weights", _set(topk_idx=None)),
        ("is_token_in_rank", _set(is_token_in_rank=None)),
        ("is_token_in_rank", _set(is_token_in_rank=lambda kit: kit.tensor(np.zeros((2, 7), np.int32)))),
        ("num_tokens_per_rank[0]", _set(num_tokens_per_rank=lambda kit: kit.zeros((2,), "int32"))),
        ("expert_alignment", _set(expert_alignment=0)),
        ("expert_alignment", _set(expert_alignment=-1)),
        ("num_worst_tokens", _set(num_worst_tokens="many")),
        ("num_sms", _set(config=deep_ep.Config(0))),
        ("handle", _set(handle=(1, 2), topk_idx=None, topk_weights=None)),
        ("topk_idx", _set(handle=(1, 2, 3, 4, 5, 6))),
        ("allocate_on_comm_stream", _set(allocate_on_comm_stream=True)),
    ],
)
def test_a_rank_that_rejects_tells_the_others(kit: Any, argument: str, change: Break) -> None:
    if kit.name == "torch-cuda" and argument == "num_tokens_per_rank[0]":
        pytest.skip("a GPU counts by itself, and the host does not look")
    world = reference.make(41, 2)
    # Rank 0 has rows for everybody, so that its counts are not zero.
    world.idx[0][:] = [0, 2, 3]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        arguments = {"x": kit.tensor(world.x[me]), **layout(buffer, kit, world)}
        broken = dict(arguments)
        if me == 0:
            change(kit, broken)
        with pytest.raises(deep_ep.Error) as caught:
            buffer.dispatch(**broken)
        error = caught.value
        expected = deep_ep.InvalidArgument if me == 0 else deep_ep.PeerRejected
        assert type(error) is expected, error
        assert (error.argument == argument and error.value is not None) or argument == "is_token_in_rank"
        assert str(error.limit).startswith("must")
        if me == 1:
            assert error.ranks == [0]
        rows, *_ = buffer.dispatch(**arguments)
        assert kit.array(rows).shape[0] == len(world.arrivals(me))

    kit.run(rank, 2)


def test_an_expert_that_does_not_exist_is_named(kit: Any) -> None:
    if kit.name == "torch-cuda":
        pytest.skip("a GPU finds it in the dispatch: see test_cuda")

    def rank(group: Group) -> None:
        buffer = Buffer(group)
        with pytest.raises(ValueError) as caught:
            buffer.get_dispatch_layout(kit.tensor(np.array([[0, 9]])), 4)
        assert isinstance(caught.value, deep_ep.InvalidArgument)
        assert (caught.value.argument, caught.value.value) == ("topk_idx[0, 1]", "9")
        with pytest.raises(deep_ep.InvalidArgument):
            buffer.get_dispatch_layout([[0, 1]], 4)

    kit.run(rank, 1)


@pytest.mark.parametrize(
    "argument,options",
    [
        ("async_finish", {"async_finish": True, "return_recv_hook": True}),
        ("use_ue8m0", {"use_ue8m0": True}),
        ("hidden", {"use_fp8": True}),
        ("x", {"num_max_dispatch_tokens_per_rank": 1}),
        ("num_experts", {"num_experts": 5}),
        ("cumulative_local_expert_recv_stats", {"cumulative_local_expert_recv_stats": np.zeros(3)}),
    ],
)
def test_low_latency_rejects_are_told_too(kit: Any, argument: str, options: dict[str, Any]) -> None:
    world = reference.make(42, 2)
    world.tokens = [max(n, 2) for n in world.tokens]
    world.x = [np.ones((n, 64), np.float32).astype(BF16) for n in world.tokens]
    world.idx = [np.zeros((n, 3), np.int64) for n in world.tokens]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        arguments = {
            "x": kit.tensor(world.x[me]),
            "topk_idx": kit.tensor(world.idx[me]),
            "num_max_dispatch_tokens_per_rank": MOST,
            "num_experts": world.experts,
            "use_fp8": False,
        }
        broken = {**arguments, **options} if me == 0 else arguments
        with pytest.raises(deep_ep.Error) as caught:
            buffer.low_latency_dispatch(**broken)
            kit.settle(buffer)
        assert type(caught.value) is (deep_ep.InvalidArgument if me == 0 else deep_ep.PeerRejected)
        assert caught.value.argument == argument, caught.value
        recv, _, handle, _, _ = buffer.low_latency_dispatch(**arguments)
        weights = kit.tensor(np.ones(world.idx[me].shape, np.float32))
        with pytest.raises(deep_ep.Error):
            # Rank 0 says zero_copy without the buffer for it.
            buffer.low_latency_combine(recv, arguments["topk_idx"], weights, handle, zero_copy=me == 0)
            kit.settle(buffer)
        combined, _, _ = buffer.low_latency_combine(recv, arguments["topk_idx"], weights, handle)
        assert (kit.array(combined).astype(np.float32) == 3).all()

    kit.run(rank, 2)


def test_low_latency_calls_need_memory_for_them(kit: Any) -> None:
    def rank(group: Group) -> None:
        buffer = Buffer(group)
        with pytest.raises(deep_ep.InvalidArgument) as caught:
            buffer.low_latency_dispatch(
                kit.tensor(np.zeros((1, 64), BF16)),
                kit.tensor(np.zeros((1, 1), np.int64)),
                4,
                2,
                use_fp8=False,
            )
        assert caught.value.argument == "low_latency"

    kit.run(rank, 1)


def test_ranks_must_agree_about_settings() -> None:
    def rank(group: Group) -> None:
        size = 1 << (16 + group.rank())
        with pytest.raises(deep_ep.SettingsDiffer) as caught:
            Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
        assert caught.value.argument == "low_latency" and caught.value.ranks == [1 - group.rank()]
        Buffer(group).barrier()

    run_local(rank, 2)


def test_memory_of_a_device_is_refused_by_the_cpu_engine() -> None:
    def rank(group: Group) -> None:
        from deep_ep import _native

        buffer = Buffer(group)
        on_device = (4096, "int64", (2, 2), (2, 1), 0)
        with pytest.raises(deep_ep.InvalidArgument, match="engine cpu"):
            buffer._core.layout(on_device, 4, 0)
        x = (4096, "bfloat16", (2, 64), (64, 1), 0)
        routes, counts = _native.empty("bool", (2, 1)), _native.empty("int32", (1,))
        arguments: Any = {
            "x": x,
            "scales": None,
            "layout": (routes.spec, counts.spec, counts.spec),
            "handle": None,
            "topk_idx": None,
            "topk_weights": None,
            "expert_alignment": 1,
            "num_worst_tokens": None,
            "num_sms": 2,
            "loan": False,
            "keep": (),
            "stream": 0,
        }
        with pytest.raises(deep_ep.InvalidArgument, match="engine cpu") as caught:
            buffer._core.dispatch(arguments, lambda rows: (x, None, None, None))
        assert caught.value.argument == "x"

    run_local(rank, 1)


def test_an_output_that_cannot_be_written_is_found_before_the_send(kit: Any) -> None:
    world = reference.make(43, 2)
    world.weights = [np.where(np.isnan(w), 0, w) for w in world.weights]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        idx, weights = kit.tensor(world.idx[me]), kit.tensor(world.weights[me])
        recv, _, handle, _, _ = buffer.low_latency_dispatch(
            kit.tensor(world.x[me]), idx, MOST, world.experts, use_fp8=False
        )
        tokens = max(world.tokens[me], 2)
        one = kit.tensor(np.zeros((1, 64), BF16))
        wrong = [
            kit.expand(one, tokens),
            kit.tensor(np.zeros((tokens + 1, 64), BF16)),
            kit.tensor(np.zeros((tokens, 64), "f4")),
        ]
        for out in wrong:
            with pytest.raises(deep_ep.Error) as caught:
                buffer.low_latency_combine(recv, idx, weights, handle, out=out if me == 0 else None)
                kit.settle(buffer)
            assert type(caught.value) is (deep_ep.InvalidArgument if me == 0 else deep_ep.PeerRejected)
            assert caught.value.argument == "out"
        buffer.low_latency_combine(recv, idx, weights, handle)

    kit.run(rank, 2)


def test_a_rank_without_memory_for_an_output_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_ep._arrays import NumpyArrays
    from kit import NumpyKit

    world, kit = reference.make(44, 2), NumpyKit()
    right = NumpyArrays.empty

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        arguments = layout(buffer, kit, world)
        recv, _, recv_weights, _, handle, _ = buffer.dispatch(world.x[me], **arguments)
        assert handle is not None

        def empty(self: Any, shape: Any, dtype: Any, like: Any, strides: Any = None) -> Any:
            if me == 0 and shape[0] == world.tokens[0]:
                raise MemoryError("there is none")
            return right(self, shape, dtype, like, strides)

        group.barrier()
        if me == 0:
            monkeypatch.setattr(NumpyArrays, "empty", empty)
        group.barrier()
        with pytest.raises((MemoryError, deep_ep.PeerRejected)) as caught:
            buffer.combine(recv, handle, topk_weights=recv_weights)
        assert isinstance(caught.value, MemoryError) == (me == 0)
        group.barrier()
        monkeypatch.undo()
        group.barrier()
        buffer.combine(recv, handle)

    run_local(rank, 2)


def test_keywords_of_forks_are_a_type_error(kit: Any) -> None:
    def rank(group: Group) -> None:
        buffer: Any = Buffer(group)
        with pytest.raises(TypeError):
            buffer.low_latency_dispatch(None, None, 1, 1, use_nvfp4=True)
        with pytest.raises(TypeError):
            buffer.combine(None, None, overlap=True)

    kit.run(rank, 1)


def test_errors_keep_their_fields_between_processes() -> None:
    error = deep_ep.Timeout("late", ranks=[1, 2], stage="counts", operation="dispatch", waited=2.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is deep_ep.Timeout and str(copy) == "late"
    assert (copy.ranks, copy.stage, copy.operation, copy.waited) == ([1, 2], "counts", "dispatch", 2.5)
    assert isinstance(copy, TimeoutError) and isinstance(copy, deep_ep.Error)

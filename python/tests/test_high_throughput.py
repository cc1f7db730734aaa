"""High-throughput dispatch and combine, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import deep_ep
import reference
from deep_ep import Buffer, Group
from kit import BF16, FP8
from reference import World


def layout(buffer: Buffer, kit: Any, world: World, idx: Any = None) -> dict[str, Any]:
    """Dispatch's arguments from the choices of this rank."""
    idx = kit.tensor(world.idx[buffer.rank]) if idx is None else idx
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, world.experts)
    assert per_node is None and event.event is None
    return {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": idx,
        "topk_weights": kit.tensor(world.weights[buffer.rank]),
    }


@pytest.mark.parametrize("seed,ranks", [(1, 1), (2, 2), (3, 3), (4, 5), (5, 4), (6, 7), (7, 12)])
def test_rows_choices_and_weights_arrive_in_source_order(kit: Any, seed: int, ranks: int) -> None:
    world = reference.make(seed, ranks)

    def rank(group: Group) -> None:
        buffer = Buffer(group)
        me = group.rank()
        arguments = layout(buffer, kit, world)
        in_rank = kit.array(arguments["is_token_in_rank"])
        assert in_rank.dtype == np.bool_
        expected = [[r in world.goes(me, t) for r in range(ranks)] for t in range(world.tokens[me])]
        assert in_rank.tolist() == expected
        x = kit.tensor(world.x[me])
        recv_x, idx, weights, counts, handle, event = buffer.dispatch(x, expert_alignment=4, **arguments)
        assert event.event is None
        arrivals = world.arrivals(me)
        rows = [world.x[source][token] for source, token in arrivals]
        got = kit.array(recv_x)
        assert got.shape == (len(rows), world.hidden) and got.dtype == BF16
        assert got.tobytes() == b"".join(row.tobytes() for row in rows)
        locals_ = [world.local_idx(me, *at) for at in arrivals]
        assert kit.array(idx).dtype == np.int64
        assert kit.array(idx).tolist() == locals_
        for row, (source, token) in enumerate(arrivals):
            theirs = [
                w if e >= 0 else 0.0 for w, e in zip(world.weights[source][token].tolist(), locals_[row])
            ]
            assert kit.array(weights)[row].tolist() == theirs
        choices = np.bincount([e for row in locals_ for e in row if e >= 0], minlength=2)
        assert counts == [-(-int(n) // 4) * 4 for n in choices]
        check_handle(kit, world, me, handle)

    kit.run(rank, ranks)


def check_handle(kit: Any, world: World, me: int, handle: Any) -> None:
    """The tuple that frameworks take apart."""
    assert type(handle) is tuple and len(handle) == 6
    prefix, channels, recv_channels, source, in_rank, head = map(kit.array, handle)
    arrivals = world.arrivals(me)
    of_source = [sum(s <= r for s, _ in arrivals) for r in range(world.ranks)]
    assert prefix.dtype == np.int32 and prefix[:, me].tolist() == of_source
    assert channels.shape == recv_channels.shape == (world.ranks, 1)
    assert source.dtype == np.int32 and source.tolist() == [token for _, token in arrivals]
    assert in_rank.dtype == np.bool_ and head.dtype == np.int32
    for r in range(world.ranks):
        mine = [t for t in range(world.tokens[me]) if r in world.goes(me, t)]
        assert head[mine, r].tolist() == list(range(len(mine)))
        assert channels[r, 0] == len(mine)
    assert (head[~in_rank] == -1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_combine_sums_by_rank_after_the_bias_and_rounds_once(kit: Any, dtype: str, biases: int) -> None:
    ranks = 3
    world = reference.make(7 + biases, ranks)
    real = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    outputs = [
        rng.standard_normal((len(world.arrivals(r)), world.hidden)).astype(np.float32).astype(real)
        for r in range(ranks)
    ]
    bias = [
        [rng.standard_normal(x.shape).astype(np.float32).astype(real) for x in world.x]
        for _ in range(biases)
    ]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        _, _, recv_weights, _, handle, _ = buffer.dispatch(
            kit.tensor(world.x[me]), **layout(buffer, kit, world)
        )
        mine = [kit.tensor(one[me]) for one in bias]
        passed = None if not mine else mine[0] if len(mine) == 1 else tuple(mine)
        # Another buffer of the same rank and group takes the handle, rebuilt as a tuple.
        other = Buffer(group)
        x, weights, event = other.combine(
            kit.tensor(outputs[me]), tuple(list(handle)), topk_weights=recv_weights, bias=passed
        )
        assert event.event is None
        expected = reference.combine(world, me, outputs, [one[me] for one in bias])
        assert kit.array(x).dtype == real
        assert kit.array(x).tobytes() == expected.tobytes()
        chosen = np.where(world.idx[me] >= 0, world.weights[me], 0)
        assert kit.array(weights).tolist() == chosen.tolist()

    kit.run(rank, ranks)


def test_cached_routes_bring_the_same_rows(kit: Any) -> None:
    world = reference.make(11, 4)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        x = kit.tensor(world.x[me])
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout(buffer, kit, world))
        again = Buffer(group).dispatch(x, handle=handle, config=deep_ep.Config(2))
        assert again[1:5] == (None, None, None, None)
        assert kit.array(again[0]).tobytes() == kit.array(recv_x).tobytes()

    kit.run(rank, 4)


def test_worst_case_rows_end_with_rows_of_nobody(kit: Any) -> None:
    world = reference.make(12, 3)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        x = kit.tensor(world.x[me])
        arguments = layout(buffer, kit, world)
        exact = buffer.dispatch(x, **arguments)
        n, worst = len(world.arrivals(me)), sum(world.tokens) + 3
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(x, num_worst_tokens=worst, **arguments)
        assert counts == []
        assert kit.array(recv_x).shape == (worst, world.hidden)
        assert kit.array(handle[3]).shape == (worst,)
        assert (kit.array(idx)[n:] == -1).all()
        assert kit.array(recv_x)[:n].tobytes() == kit.array(exact[0]).tobytes()
        assert kit.array(weights)[:n].tobytes() == kit.array(exact[2]).tobytes()
        combined, _, _ = buffer.combine(recv_x, handle)
        plain, _, _ = buffer.combine(exact[0], exact[4])
        assert kit.array(combined).tobytes() == kit.array(plain).tobytes()
        cached = buffer.dispatch(x, handle=handle)[0]
        assert kit.array(cached).shape == (worst, world.hidden)
        assert kit.array(cached)[:n].tobytes() == kit.array(exact[0]).tobytes()
        with pytest.raises((deep_ep.InvalidArgument, deep_ep.PeerRejected)):
            fewest = max(max(len(world.arrivals(r)) for r in range(3)) - 1, 1)
            buffer.dispatch(x, num_worst_tokens=fewest, **arguments)
            kit.settle(buffer)
        assert kit.array(buffer.dispatch(x, handle=handle)[0])[:n].size == n * world.hidden

    kit.run(rank, 3)


@pytest.mark.parametrize("scale_type", [np.float32, np.int32])
def test_fp8_rows_travel_with_scales_of_any_strides(kit: Any, scale_type: Any) -> None:
    world = reference.make(13, 2, hidden=256)
    rng = np.random.default_rng(1)
    data = [rng.integers(0, 256, x.shape).astype(np.uint8).view(FP8) for x in world.x]
    # Column-major scales, as GEMM libraries keep them.
    scales = [rng.integers(0, 100, (2, x.shape[0])).astype(scale_type).T for x in world.x]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        pair = (kit.tensor(data[me]), kit.tensor(scales[me]))
        (recv, recv_scales), _, _, _, handle, _ = buffer.dispatch(pair, **layout(buffer, kit, world))
        arrivals = world.arrivals(me)
        assert kit.array(recv).dtype == FP8
        assert kit.array(recv).tobytes() == b"".join(data[s][t].tobytes() for s, t in arrivals)
        assert kit.array(recv_scales).dtype == scale_type
        assert kit.array(recv_scales).tolist() == [scales[s][t].tolist() for s, t in arrivals]
        # A pair without scales is one tensor.
        assert not isinstance(buffer.dispatch((pair[0], None), handle=handle)[0], tuple)

    kit.run(rank, 2)


@pytest.mark.parametrize("dtype", ["float64", "int16", "uint8", "int64", "bool"])
def test_rows_of_any_element_type_are_moved(kit: Any, dtype: str) -> None:
    world = reference.make(14, 2)
    rng = np.random.default_rng(2)
    data = [rng.integers(0, 2, x.shape).astype(dtype) for x in world.x]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        recv, *_ = buffer.dispatch(kit.tensor(data[me]), **layout(buffer, kit, world))
        assert kit.array(recv).dtype == np.dtype(dtype)
        assert kit.array(recv).tolist() == [data[s][t].tolist() for s, t in world.arrivals(me)]

    kit.run(rank, 2)


def test_choices_of_32_bits_come_back_as_such_and_rows_may_be_apart(kit: Any) -> None:
    world = reference.make(15, 2)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        wide = np.zeros((world.tokens[me], 2 * world.hidden), BF16)
        wide[:, : world.hidden] = world.x[me]
        x = kit.tensor(wide)[:, : world.hidden]
        idx = kit.tensor(world.idx[me].astype(np.int32))
        recv, recv_idx, *_ = buffer.dispatch(x, **layout(buffer, kit, world, idx))
        assert kit.array(recv_idx).dtype == np.int32
        rows = [world.x[s][t] for s, t in world.arrivals(me)]
        assert kit.array(recv).tobytes() == b"".join(row.tobytes() for row in rows)

    kit.run(rank, 2)


def test_no_rank_has_tokens(kit: Any) -> None:
    world = World(2, 2, 64, 3, [0, 0])
    world.x = [np.zeros((0, 64), BF16)] * 2
    world.idx = [np.zeros((0, 3), np.int64)] * 2
    world.weights = [np.zeros((0, 3), np.float32)] * 2

    def rank(group: Group) -> None:
        buffer = Buffer(group)
        x = kit.tensor(world.x[group.rank()])
        recv, _, _, counts, handle, _ = buffer.dispatch(x, **layout(buffer, kit, world))
        assert kit.array(recv).shape == (0, 64) and counts == [0, 0]
        combined, _, _ = buffer.combine(recv, handle)
        assert kit.array(combined).shape == (0, 64)

    kit.run(rank, 2)


def test_events_are_there_exactly_with_async_finish(kit: Any) -> None:
    world = reference.make(16, 2)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        x = kit.tensor(world.x[me])
        before = Buffer.capture()
        event = buffer.get_dispatch_layout(kit.tensor(world.idx[me]), world.experts, before, True, True)[
            -1
        ]
        arguments = layout(buffer, kit, world)
        modes = {"async_finish": True, "allocate_on_comm_stream": True}
        recv, _, _, _, handle, event = buffer.dispatch(x, previous_event=event, **modes, **arguments)
        with event:
            pass
        _, _, event = buffer.combine(recv, handle, previous_event=event, **modes)
        event.current_stream_wait()
        # An EventOverlap without event is as good as none.
        empty = deep_ep.EventOverlap()
        assert buffer.dispatch(x, handle=handle, previous_event=empty)[-1].event is None
        with pytest.raises(AssertionError):
            empty.current_stream_wait()
        with pytest.raises(deep_ep.InvalidArgument) as caught:
            buffer.dispatch(x, handle=handle, allocate_on_comm_stream=True)
        assert caught.value.argument == "allocate_on_comm_stream"

    kit.run(rank, 2)

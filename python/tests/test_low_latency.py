"""Low-latency dispatch and combine, against the reference."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import deep_ep
import reference
from deep_ep import Buffer, Group, run_local
from kit import BF16, FP8
from reference import World

MOST = 12


def buffer_for(group: Group, world: World, **more: Any) -> Buffer:
    """A buffer with room for the world's low-latency calls."""
    size = Buffer.get_low_latency_rdma_size_hint(MOST, world.hidden, world.ranks, world.experts)
    return Buffer(group, num_rdma_bytes=size, low_latency_mode=True, **more)


def unpacked(handle: Any, kit: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of rows, and (begin, count) by local expert and source."""
    assert type(handle) is tuple and len(handle) == 5
    info, layout = kit.array(handle[0]), kit.array(handle[1])
    assert info.dtype == np.int32 and layout.dtype == np.int64
    return info, np.stack([layout >> 32, layout & 0xFFFFFFFF], axis=-1)


def check_dispatch(
    kit: Any, world: World, me: int, count: Any, handle: Any
) -> list[list[tuple[int, int]]]:
    """Compares counts and handle; returns source and token of the rows of each expert."""
    info, ranges = unpacked(handle, kit)
    arrivals = []
    for local in range(world.experts_per_rank):
        rows = world.expert_arrivals(me * world.experts_per_rank + local)
        assert kit.array(count)[local] == len(rows)
        assert info[local, : len(rows)].tolist() == [token for _, token in rows]
        begin = 0
        for source in range(world.ranks):
            of_source = sum(s == source for s, _ in rows)
            assert ranges[local, source].tolist() == [begin, of_source]
            begin += of_source
        arrivals.append(rows)
    assert handle[2:] == (MOST, world.hidden, world.experts)
    return arrivals


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("seed,ranks", [(1, 1), (2, 2), (3, 3), (4, 5), (5, 12)])
def test_rows_of_an_expert_are_packed_in_source_order(
    kit: Any, seed: int, ranks: int, hook: bool
) -> None:
    world = reference.make(seed, ranks)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        stats = kit.zeros((world.experts_per_rank,), "int32")
        waited = kit.zeros((ranks,), "int64")
        for call in (1, 2):
            recv, count, handle, event, receive = buffer.low_latency_dispatch(
                kit.tensor(world.x[me]), kit.tensor(world.idx[me]), MOST, world.experts,
                stats, waited, use_fp8=False, return_recv_hook=hook,
            )  # fmt: skip
            assert event.event is None and (receive is not None) == hook
            if receive is not None:
                receive()
                with pytest.raises(RuntimeError):
                    receive()
            got = kit.array(recv)
            assert got.shape == (world.experts_per_rank, ranks * MOST, world.hidden)
            rows = check_dispatch(kit, world, me, count, handle)
            for local, at in enumerate(rows):
                expected = b"".join(world.x[s][t].tobytes() for s, t in at)
                assert got[local, : len(at)].tobytes() == expected
            assert kit.array(stats).tolist() == [call * len(at) for at in rows]
            assert (kit.array(waited) >= 0).all()

    kit.run(rank, ranks)


@pytest.mark.parametrize("format", ["f32", "power of two", "ue8m0"])
@pytest.mark.parametrize("most", [MOST, MOST + 1])
def test_fp8_rows_and_their_scales(kit: Any, format: str, most: int) -> None:
    world = reference.make(21, 3, hidden=512)
    cast = [reference.cast_fp8(x, format != "f32") for x in world.x]

    def rank(group: Group) -> None:
        me = group.rank()
        size = Buffer.get_low_latency_rdma_size_hint(most, 512, 3, world.experts)
        buffer = Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
        (recv, scales), *_ = buffer.low_latency_dispatch(
            kit.tensor(world.x[me]), kit.tensor(world.idx[me]), most, world.experts,
            use_fp8=True, round_scale=format != "f32", use_ue8m0=format == "ue8m0",
        )  # fmt: skip
        codes, factors = kit.array(recv), kit.array(scales)
        assert codes.dtype == FP8
        columns = 1 if format == "ue8m0" else 4
        assert factors.shape == (world.experts_per_rank, 3 * most, columns)
        apart = -(-3 * most // 4) * 4
        assert factors.strides == (4 * columns * apart, 4, 4 * apart)
        for local in range(world.experts_per_rank):
            for row, (s, t) in enumerate(world.expert_arrivals(me * world.experts_per_rank + local)):
                assert codes[local, row].tobytes() == cast[s][0][t].tobytes()
                theirs = cast[s][1][t]
                if format == "ue8m0":
                    exponents = (np.log2(theirs) + 127).astype(np.uint8)
                    assert factors[local, row].tobytes() == exponents.tobytes()
                else:
                    assert factors[local, row].tolist() == theirs.tolist()

    kit.run(rank, 3)


@pytest.mark.parametrize("mode", ["plain", "hook", "out", "zero_copy", "logfmt", "async"])
def test_combine_weights_and_sums(kit: Any, mode: str) -> None:
    world = reference.make(31, 3, hidden=128)
    # The deviation of 10-bit logarithms is judged over random data of some size.
    world.weights = [np.where(np.isnan(w), 0, w) for w in world.weights]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, world.experts, use_fp8=False)
        weights = kit.tensor(world.weights[me])
        options: dict[str, Any] = {
            "return_recv_hook": mode == "hook",
            "use_logfmt": mode == "logfmt",
            "zero_copy": mode == "zero_copy",
            "async_finish": mode == "async",
        }
        if mode == "out":
            options["out"] = kit.tensor(np.zeros(world.x[me].shape, BF16))
        for _ in range(2):
            if mode == "zero_copy":
                target = buffer.get_next_low_latency_combine_buffer(handle)
                kit.fill(target, kit.array(recv))
            combined, event, hook = buffer.low_latency_combine(recv, idx, weights, handle, **options)
            assert (hook is not None) == (mode == "hook") and (event.event is not None) == (
                mode == "async"
            )
            if hook is not None:
                hook()
            if mode == "out":
                assert combined is options["out"]
            chosen = np.where(world.idx[me] >= 0, world.weights[me], 0).astype(np.float64)
            exact = world.x[me].astype(np.float64) * chosen.sum(1, keepdims=True)
            bound = np.abs(world.x[me].astype(np.float64)) * chosen.sum(1, keepdims=True) * 2**-7
            got = kit.array(combined).astype(np.float64)
            if mode == "logfmt":
                norms = (exact * exact).sum() + (got * got).sum()
                assert norms == 0 or 1 - 2 * (exact * got).sum() / norms < 1e-3
            else:
                assert (np.abs(got - exact) <= bound + 2.0**-133).all()

    kit.run(rank, 3)


def test_a_hook_may_outlive_what_the_caller_holds(kit: Any) -> None:
    world = reference.make(35, 2, hidden=4096)
    world.weights = [np.where(np.isnan(w), 0, w) for w in world.weights]

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)

        def send() -> Any:
            x, idx = kit.tensor(world.x[me].copy()), kit.tensor(world.idx[me].copy())
            recv, _, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, MOST, world.experts, use_fp8=False, return_recv_hook=True
            )
            assert hook is not None
            hook()
            weights = kit.tensor(world.weights[me].copy())
            return buffer.low_latency_combine(recv, idx, weights, handle, return_recv_hook=True)[2]

        hooks = [send()]
        gc.collect()
        hooks.pop()()
        # A call that is never received is abandoned, on all ranks alike; the next one works.
        send()
        gc.collect()
        send()()

    kit.run(rank, 2)


def test_a_handle_may_be_taken_apart_and_used_for_rows_of_another_size(kit: Any) -> None:
    world = reference.make(32, 2)
    hidden = 16

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        idx = kit.tensor(world.idx[me])
        _, _, handle, _, _ = buffer.low_latency_dispatch(
            kit.tensor(world.x[me]), idx, MOST, world.experts, use_fp8=False
        )
        info, layout, most, _, experts = handle
        outputs = np.ones((world.experts_per_rank, 2 * MOST, hidden), np.float32).astype(BF16)
        ones = kit.tensor(np.ones(world.idx[me].shape, np.float32))
        combined, _, _ = buffer.low_latency_combine(
            kit.tensor(outputs), idx, ones, (info, layout, most, hidden, experts)
        )
        expected = (world.idx[me] >= 0).sum(1, keepdims=True) * np.ones((1, hidden))
        assert kit.array(combined).astype(np.float64).tolist() == expected.tolist()

    kit.run(rank, 2)


def test_both_families_interleave_on_one_buffer(kit: Any) -> None:
    world = reference.make(33, 2)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, world.experts)
        for _ in range(3):
            _recv, count, _, _, hook = buffer.low_latency_dispatch(
                x, idx, MOST, world.experts, use_fp8=False, return_recv_hook=True
            )
            assert hook is not None
            hook()
            assert kit.array(count).sum() == sum(
                len(world.expert_arrivals(me * 2 + local)) for local in range(2)
            )
            rows, *_ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
            )
            assert kit.array(rows).shape[0] == len(world.arrivals(me))
            buffer.clean_low_latency_buffer(MOST, world.hidden, world.experts)

    kit.run(rank, 2)


def test_a_masked_rank_neither_gets_nor_sends(kit: Any) -> None:
    world = reference.make(34, 3)
    world.weights = [np.where(np.isnan(w), 0, w) for w in world.weights]
    away = 2

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world, enable_shrink=True)
        if me == away:
            group.barrier()
            return
        status = kit.zeros((3,), "int32")
        buffer.low_latency_query_mask_buffer(status)
        assert kit.array(status).tolist() == [0, 0, 0]
        buffer.low_latency_update_mask_buffer(away, True)
        buffer.low_latency_query_mask_buffer(status)
        assert kit.array(status).tolist() == [0, 0, 1]
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        recv, count, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, MOST, world.experts, use_fp8=False
        )
        expected = [len(world.expert_arrivals(me * 2 + e, frozenset([away]))) for e in range(2)]
        assert kit.array(count).tolist() == expected
        combined, _, _ = buffer.low_latency_combine(recv, idx, kit.tensor(world.weights[me]), handle)
        here = (world.idx[me] >= 0) & (world.idx[me] < away * world.experts_per_rank)
        exact = world.x[me].astype(np.float64) * np.where(here, world.weights[me], 0).sum(
            1, keepdims=True
        )
        assert np.abs(kit.array(combined).astype(np.float64) - exact).max(initial=0) < 0.1
        group.barrier()
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert kit.array(status).tolist() == [0, 0, 0]

    kit.run(rank, 3)


def test_masks_need_enable_shrink() -> None:
    def rank(group: Group) -> None:
        buffer = Buffer(group)
        with pytest.raises(deep_ep.InvalidArgument) as caught:
            buffer.low_latency_update_mask_buffer(0, True)
        assert caught.value.argument == "enable_shrink"
        buffer.clean_low_latency_buffer(MOST, 64, 2)

    run_local(rank, 1)

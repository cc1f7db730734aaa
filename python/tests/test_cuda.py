"""Streams, events, graphs and memory: what torch's tensors on a GPU need besides right results.

Where a property also makes sense for tensors on the CPU, it is shown there, too.
"""

from __future__ import annotations

import gc
import threading
from typing import Any, Callable

import numpy as np
import pytest

import deep_ep
import reference
from deep_ep import Buffer, EventOverlap, Group
from reference import World
from test_high_throughput import layout
from test_low_latency import MOST, buffer_for

#: Clock cycles (some 20 ms) for which a stream is kept busy, so that what does not wait comes too early.
BUSY = 40_000_000
ON_COMM = {"async_finish": True, "allocate_on_comm_stream": True}


def keep_busy(kit: Any) -> None:
    """Delays the current stream."""
    if kit.device == "cuda":
        kit.torch.cuda._sleep(BUSY)


def received(world: World, rank: int) -> bytes:
    """The rows that come to a rank."""
    return b"".join(world.x[s][t].tobytes() for s, t in world.arrivals(rank))


def finite(world: World) -> World:
    """The world with weights that can be multiplied by zero."""
    world.weights = [np.where(np.isnan(w), 0, w) for w in world.weights]
    return world


def check_weighted(kit: Any, world: World, rank: int, combined: Any) -> None:
    """A low-latency combine of the rows themselves, within two roundings."""
    exact = reference.weighted(world, rank)
    apart = np.abs(kit.array(combined).astype(np.float64) - exact)
    assert (apart <= np.abs(exact) * 2.0**-7 + 2.0**-133).all()


# Events and streams.


def test_inputs_may_be_written_once_the_current_stream_waits_for_the_event(torch_kit: Any) -> None:
    kit, world = torch_kit, reference.make(101, 2, hidden=512)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        for _ in range(3):
            # Tensors on the CPU share memory with the arrays.
            x, idx = kit.tensor(world.x[me].copy()), kit.tensor(world.idx[me].copy())
            arguments = layout(buffer, kit, world, idx)
            recv, _, _, _, handle, event = buffer.dispatch(x, async_finish=True, **arguments)
            event.current_stream_wait()
            x.fill_(7)
            idx.fill_(-1)
            outputs = recv.clone()
            combined, _, event = buffer.combine(recv, handle, async_finish=True)
            event.current_stream_wait()
            recv.fill_(7)
            assert kit.array(outputs).tobytes() == received(world, me)
            rows = [np.stack([world.x[s][t] for s, t in at]) if at else world.x[0][:0]
                    for at in map(world.arrivals, range(2))]  # fmt: skip
            expected = reference.combine(world, me, rows, [])
            assert kit.array(combined).tobytes() == expected.tobytes()

    kit.run(rank, 2)


def test_calls_after_events_allocate_on_the_communication_stream(torch_kit: Any) -> None:
    kit, world = torch_kit, reference.make(102, 3)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        event = Buffer.capture()
        # What comes behind the event is not waited for.
        keep_busy(kit)
        *counts, event = buffer.get_dispatch_layout(idx, world.experts, event, **ON_COMM)
        recv, _, _, _, handle, event = buffer.dispatch(
            x, None, *counts[:2], counts[3], counts[2], idx, previous_event=event, **ON_COMM
        )
        combined, _, event = buffer.combine(recv, handle, previous_event=event, **ON_COMM)
        cached, *_, event = buffer.dispatch(x, handle, previous_event=event, **ON_COMM)
        with event:
            pass
        assert kit.array(recv).tobytes() == kit.array(cached).tobytes() == received(world, me)
        goes = [len(world.goes(me, t)) for t in range(world.tokens[me])]
        nowhere = [t for t, n in enumerate(goes) if n == 0]
        once = [t for t, n in enumerate(goes) if n == 1]
        assert not kit.array(combined)[nowhere].any()
        assert kit.array(combined)[once].tobytes() == world.x[me][once].tobytes()

    kit.run(rank, 3)


def test_the_current_stream_is_the_same_after_every_call_also_one_that_fails(cuda: Any) -> None:
    torch, world = cuda.torch, reference.make(103, 2)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        stream = torch.cuda.current_stream()
        x, arguments = cuda.tensor(world.x[me]), layout(buffer, cuda, world)
        wrong = {**arguments, "topk_weights": cuda.zeros((1, 1), "int64")} if me == 0 else arguments
        with pytest.raises(deep_ep.Error):
            buffer.dispatch(x, previous_event=Buffer.capture(), **ON_COMM, **wrong)
        assert torch.cuda.current_stream() == stream
        recv, *_, event = buffer.dispatch(x, previous_event=Buffer.capture(), **ON_COMM, **arguments)
        assert torch.cuda.current_stream() == stream
        event.current_stream_wait()
        assert cuda.array(recv).tobytes() == received(world, me)

    cuda.run(rank, 2)


def test_a_buffer_keeps_one_communication_stream_of_its_own(cuda: Any) -> None:
    torch = cuda.torch

    def rank(group: Group) -> None:
        buffers = [Buffer(group) for _ in range(3)]
        streams = [buffer.get_comm_stream() for buffer in buffers]
        handles = {stream.cuda_stream for stream in streams}
        assert len(handles) == 3 and 0 not in handles
        assert torch.cuda.current_stream().cuda_stream not in handles
        assert [buffer.get_comm_stream() for buffer in buffers] == streams

    cuda.run(rank, 1)


def test_one_rank_may_work_on_the_legacy_default_stream(cuda: Any) -> None:
    world = finite(reference.make(104, 1, hidden=512))

    def rank(group: Group) -> None:
        cuda.torch.cuda.set_device(0)
        assert cuda.torch.cuda.current_stream().cuda_stream == 0
        buffer = buffer_for(group, world)
        x, idx = cuda.tensor(world.x[0]), cuda.tensor(world.idx[0])
        recv, *_ = buffer.dispatch(x, **layout(buffer, cuda, world))
        assert cuda.array(recv).tobytes() == received(world, 0)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, MOST, world.experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        combined, *_ = buffer.low_latency_combine(rows, idx, cuda.tensor(world.weights[0]), handle)
        check_weighted(cuda, world, 0, combined)

    deep_ep.run_local(rank, 1)


# Memory.


def test_a_dropped_input_is_not_used_again_while_a_call_reads_it(torch_kit: Any) -> None:
    kit, world = torch_kit, reference.make(111, 2, hidden=4096)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        arguments, results = layout(buffer, kit, world), []
        for _ in range(8):
            x = kit.tensor(world.x[me])
            recv, *_, event = buffer.dispatch(x, async_finish=True, **arguments)
            results.append((recv, event))
            # The allocator would give the same memory if it did not know of the call.
            del x
            kit.torch.empty(world.x[me].shape, dtype=recv.dtype, device=kit.device).fill_(7)
        for recv, event in results:
            event.current_stream_wait()
            assert kit.array(recv).tobytes() == received(world, me)

    kit.run(rank, 2)


def test_a_dropped_output_is_not_used_again_while_the_current_stream_reads_it(torch_kit: Any) -> None:
    kit = torch_kit
    worlds = [reference.make(112, 2, hidden=4096)]
    worlds.append(reference.again(worlds[0], 113))

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        inputs = [(kit.tensor(w.x[me]), layout(buffer, kit, w)) for w in worlds]
        before, copies = Buffer.capture(), []
        for turn in range(6):
            x, arguments = inputs[turn % 2]
            recv, _, _, _, handle, event = buffer.dispatch(
                x, previous_event=before, **ON_COMM, **arguments
            )
            event.current_stream_wait()
            keep_busy(kit)
            # Rows are torch's memory; source tokens are the library's.
            copies.append((recv.clone(), handle[3].clone()))
            del recv, handle
        for turn, (rows, tokens) in enumerate(copies):
            world = worlds[turn % 2]
            assert kit.array(tokens).tolist() == [t for _, t in world.arrivals(me)]
            assert kit.array(rows).tobytes() == received(world, me)

    kit.run(rank, 2)


def test_a_buffer_may_be_dropped_while_its_call_is_in_flight(torch_kit: Any) -> None:
    kit, world = torch_kit, reference.make(114, 2)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        arguments = layout(buffer, kit, world)
        keep_busy(kit)
        recv, _, _, _, handle, event = buffer.dispatch(
            kit.tensor(world.x[me]), async_finish=True, **arguments
        )
        del buffer
        gc.collect()
        event.current_stream_wait()
        assert kit.array(recv).tobytes() == received(world, me)
        assert kit.array(handle[3]).tolist() == [t for _, t in world.arrivals(me)]

    kit.run(rank, 2)


def test_outputs_are_where_the_inputs_are_with_their_types_and_strides(torch_kit: Any) -> None:
    kit, torch = torch_kit, torch_kit.torch
    world = finite(reference.make(115, 2, hidden=512))

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        arguments = layout(buffer, kit, world)
        recv, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(x, **arguments)
        i32, i64, f32, flag = torch.int32, torch.int64, torch.float32, torch.bool
        tensors = [*arguments.values(), recv, recv_idx, recv_weights, *handle]
        types = [i32, flag, i32, i64, f32, x.dtype, i64, f32, i32, i32, i32, i32, flag, i32]
        for mode, of_scales, columns in (({}, f32, 4), ({"use_ue8m0": True}, i32, 1)):
            (rows, scales), count, route, _, _ = buffer.low_latency_dispatch(
                x, idx, MOST, world.experts, round_scale=True, **mode
            )
            assert scales.shape == (2, 2 * MOST, columns)
            assert scales.stride() == (2 * MOST * columns, 1, 2 * MOST)
            tensors += [rows, scales, count, *route[:2]]
            types += [torch.float8_e4m3fn, of_scales, i32, i32, i64]
            plain = buffer.low_latency_dispatch(x, idx, MOST, world.experts, use_fp8=False)[0]
            combined, _, _ = buffer.low_latency_combine(plain, idx, arguments["topk_weights"], route)
            tensors += [plain, combined]
            types += [x.dtype, x.dtype]
        assert [tensor.dtype for tensor in tensors] == types
        assert {tensor.device for tensor in tensors} == {x.device}
        assert all(t.is_contiguous() for t in (recv, recv_idx, recv_weights, *handle))
        local = buffer.get_local_buffer_tensor(torch.bfloat16, use_rdma_buffer=True)
        assert local.device == x.device

    kit.run(rank, 2)


# Failures that a GPU finds.


def test_a_gpu_finds_an_expert_that_does_not_exist_in_the_dispatch(cuda: Any) -> None:
    world = reference.make(121, 2)
    world.tokens[0] = max(world.tokens[0], 1)

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        right = layout(buffer, cuda, world)
        idx = world.idx[me].copy()
        if me == 0:
            idx[0, 1] = world.experts
        wrong = {**right, "topk_idx": cuda.tensor(idx)}
        x = cuda.tensor(world.x[me])
        with pytest.raises(deep_ep.Error) as caught:
            buffer.dispatch(x, **wrong)
        assert type(caught.value) is (deep_ep.InvalidArgument if me == 0 else deep_ep.PeerRejected)
        assert str(caught.value.argument).startswith("topk_idx")
        assert cuda.array(buffer.dispatch(x, **right)[0]).tobytes() == received(world, me)

    cuda.run(rank, 2)


# Hooks.


def test_a_hook_receives_on_the_stream_of_its_send_from_any_thread(torch_kit: Any) -> None:
    kit, torch = torch_kit, torch_kit.torch
    world = finite(reference.make(131, 2, hidden=512))

    def elsewhere(hook: Callable[[], None]) -> None:
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        weights, work = kit.tensor(world.weights[me]), torch.ones(64, 64, device=kit.device)
        for receive in (lambda hook: hook(), elsewhere):
            recv, count, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, MOST, world.experts, use_fp8=False, return_recv_hook=True
            )
            assert event.event is None
            product = work @ work
            keep_busy(kit)
            receive(hook)
            copies = recv.clone(), count.clone(), handle[0].clone(), handle[1].clone()
            combined, _, hook = buffer.low_latency_combine(
                recv, idx, weights, handle, return_recv_hook=True
            )
            product = product @ work
            receive(hook)
            total = 0
            for local in range(world.experts_per_rank):
                at = world.expert_arrivals(me * world.experts_per_rank + local)
                rows = kit.array(copies[0])[local, : len(at)]
                assert rows.tobytes() == b"".join(world.x[s][t].tobytes() for s, t in at)
                assert kit.array(copies[1])[local] == len(at)
                assert kit.array(copies[2])[local, : len(at)].tolist() == [t for _, t in at]
                total += len(at)
            assert (kit.array(copies[3]) & 0xFFFFFFFF).sum() == total
            check_weighted(kit, world, me, combined)
            assert kit.array(product)[0, 0] == 64 * 64

    kit.run(rank, 2)


def test_an_event_of_a_low_latency_call_keeps_its_tensors(torch_kit: Any) -> None:
    kit, world = torch_kit, finite(reference.make(132, 2, hidden=512))

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, world)
        x, idx = kit.tensor(world.x[me]), kit.tensor(world.idx[me])
        waited = kit.zeros((2,), "int64")
        recv, _, handle, event, _ = buffer.low_latency_dispatch(
            x, idx, MOST, world.experts, None, waited, use_fp8=False, async_finish=True
        )
        assert {id(t) for t in (x, idx, waited, recv)} <= set(map(id, event.extra_tensors))
        event.current_stream_wait()
        weights = kit.tensor(world.weights[me])
        combined, event, _ = buffer.low_latency_combine(
            recv, idx, weights, handle, async_finish=True, combine_wait_recv_cost_stats=waited
        )
        kept = (recv, idx, weights, waited, combined)
        assert {id(t) for t in kept} <= set(map(id, event.extra_tensors))
        event.current_stream_wait()
        check_weighted(kit, world, me, combined)
        assert (kit.array(waited) >= 0).all()

    kit.run(rank, 2)


# Graphs.

#: Ranks that are threads record one after the other: nothing that is recorded waits for a peer.
RECORDING = threading.Lock()


def recorded(kit: Any, group: Group, work: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of what ``work`` gives to the current stream, and what it returned."""
    # Compiles and loads kernels.
    work()
    kit.torch.cuda.current_stream().synchronize()
    group.barrier()
    graph = kit.torch.cuda.CUDAGraph()
    with RECORDING:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = work()
        finally:
            graph.capture_end()
    group.barrier()
    return graph, results


@pytest.mark.parametrize("async_finish", [False, True])
def test_a_graph_of_dispatch_and_combine_is_replayed_with_other_routes(
    cuda: Any, async_finish: bool
) -> None:
    first = reference.make(141, 2)
    worlds = [reference.again(first, seed) for seed in range(142, 146)]
    worst = sum(first.tokens) + 3

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        x, idx = cuda.tensor(first.x[me]), cuda.tensor(first.idx[me])
        weights = cuda.tensor(first.weights[me])

        def step() -> Any:
            ranks, nodes, experts, routes, _ = buffer.get_dispatch_layout(idx, first.experts)
            recv, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                x, None, ranks, nodes, routes, experts, idx, weights,
                num_worst_tokens=worst, async_finish=async_finish,
            )  # fmt: skip
            assert counts == []
            if async_finish:
                event.current_stream_wait()
            sums, sum_weights, event = buffer.combine(
                recv, handle, topk_weights=recv_weights, async_finish=async_finish
            )
            if async_finish:
                event.current_stream_wait()
            return recv, recv_idx, sums, sum_weights

        graph, (recv, recv_idx, sums, sum_weights) = recorded(cuda, group, step)
        for turn, world in enumerate(worlds):
            for to, array in ((x, world.x), (idx, world.idx), (weights, world.weights)):
                cuda.fill(to, array[me])
            graph.replay()
            cuda.settle(buffer)
            n = len(world.arrivals(me))
            assert cuda.array(recv)[:n].tobytes() == received(world, me)
            assert (cuda.array(recv_idx)[n:] == -1).all()
            rows = [np.stack([world.x[s][t] for s, t in at]) if at else world.x[0][:0]
                    for at in map(world.arrivals, range(2))]  # fmt: skip
            expected = reference.combine(world, me, rows, [])
            assert cuda.array(sums).tobytes() == expected.tobytes()
            chosen = np.where(world.idx[me] >= 0, world.weights[me], 0)
            assert cuda.array(sum_weights).tolist() == chosen.tolist()
            if turn == 1:
                # Eager calls come between replays.
                eager = buffer.dispatch(x, **layout(buffer, cuda, world))[0]
                assert cuda.array(eager).tobytes() == received(world, me)

    cuda.run(rank, 2)


@pytest.mark.parametrize("mode", ["plain", "hook", "async", "zero_copy", "logfmt"])
def test_a_graph_of_low_latency_calls_is_replayed_with_other_routes(cuda: Any, mode: str) -> None:
    first = finite(reference.make(151, 2, hidden=512))
    worlds = [finite(reference.again(first, seed)) for seed in range(152, 156)]
    modes = {"return_recv_hook": mode == "hook", "async_finish": mode == "async"}

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = buffer_for(group, first)
        x, idx = cuda.tensor(first.x[me]), cuda.tensor(first.idx[me])
        weights, stats = cuda.tensor(first.weights[me]), cuda.zeros((2,), "int32")

        def after(event: EventOverlap, hook: Any) -> None:
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()

        def step() -> Any:
            recv, count, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, MOST, first.experts, stats, use_fp8=False, **modes
            )
            after(event, hook)
            if mode == "zero_copy":
                buffer.get_next_low_latency_combine_buffer(handle).copy_(recv)
            combined, event, hook = buffer.low_latency_combine(
                recv, idx, weights, handle,
                use_logfmt=mode == "logfmt", zero_copy=mode == "zero_copy", **modes,
            )  # fmt: skip
            after(event, hook)
            return recv, count, combined

        graph, (recv, count, combined) = recorded(cuda, group, step)
        stats.zero_()
        total = np.zeros(2, np.int64)
        for turn, world in enumerate(worlds):
            for to, array in ((x, world.x), (idx, world.idx), (weights, world.weights)):
                cuda.fill(to, array[me])
            graph.replay()
            cuda.settle(buffer)
            rows = [world.expert_arrivals(me * 2 + local) for local in range(2)]
            total += [len(at) for at in rows]
            assert cuda.array(count).tolist() == [len(at) for at in rows]
            assert cuda.array(stats).tolist() == total.tolist()
            for local, at in enumerate(rows):
                expected = b"".join(world.x[s][t].tobytes() for s, t in at)
                assert cuda.array(recv)[local, : len(at)].tobytes() == expected
            if mode == "logfmt":
                exact, got = reference.weighted(world, me), cuda.array(combined).astype(np.float64)
                assert 1 - 2 * (exact * got).sum() / max((exact**2 + got**2).sum(), 1e-30) < 1e-3
            else:
                check_weighted(cuda, world, me, combined)
            if turn == 1:
                eager = buffer.low_latency_dispatch(x, idx, MOST, first.experts, use_fp8=False)
                assert cuda.array(eager[1]).tolist() == [len(at) for at in rows]

    cuda.run(rank, 2)

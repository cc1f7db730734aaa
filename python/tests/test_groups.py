"""Groups of other libraries."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import numpy as np
import pytest

import deep_ep
import reference
from conftest import needs_torch
from deep_ep import Buffer, Group
from kit import NumpyKit
from test_high_throughput import layout
from test_life import free_port


class Exchange:
    """What threads that pretend to be MPI ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class Communicator:
    """As much of an mpi4py communicator as is needed."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.exchange.size

    def allgather(self, value: Any) -> list[Any]:
        return self.exchange.gather(self.rank, value)


def in_threads(work: Any, size: int) -> None:
    """Runs ``work(rank)`` in threads."""
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("as_comm", [False, True])
def test_an_mpi_communicator_is_a_group(as_comm: bool) -> None:
    world = reference.make(61, 3)
    exchange = Exchange(3)

    def work(rank: int) -> None:
        comm = Communicator(exchange, rank)
        buffer = Buffer(None, comm=comm) if as_comm else Buffer(comm)
        assert (buffer.rank, buffer.group_size, buffer.group) == (rank, 3, comm)
        recv, *_ = buffer.dispatch(world.x[rank], **layout(buffer, NumpyKit(), world))
        assert recv.shape[0] == len(world.arrivals(rank))

    in_threads(work, 3)


def test_what_a_groups_exchange_raises_comes_out() -> None:
    class Broken(Communicator):
        def allgather(self, value: Any) -> list[Any]:
            raise LookupError("no network")

    with pytest.raises(LookupError, match="no network"):
        Buffer(Broken(Exchange(2), 0))

    class Odd(Communicator):
        def allgather(self, value: Any) -> list[Any]:
            return [value]

    with pytest.raises(deep_ep.BootstrapError, match="1 contributions for 2 ranks"):
        Buffer(Odd(Exchange(2), 0))


def test_something_else_is_no_group() -> None:
    with pytest.raises(deep_ep.InvalidArgument) as caught:
        Buffer(None)
    assert caught.value.argument == "group"
    with pytest.raises(deep_ep.InvalidArgument):
        Buffer("ranks")


def test_groups_exchange_bytes() -> None:
    def rank(group: Group) -> None:
        mine = bytes([group.rank()]) * group.rank()
        assert group.all_gather(mine) == [b"", b"\x01", b"\x02\x02"]
        assert group.in_process and group.local_rank() == group.rank()
        group.barrier()

    deep_ep.run_local(rank, 3)


def from_environment(rank: int, size: int, port: int) -> None:
    """A rank of a job described by the environment."""
    import os

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_PORT=str(port)
    )
    group = Group.from_env()
    world = reference.make(62, size)
    buffer = Buffer(group)
    recv, *_ = buffer.dispatch(world.x[rank], **layout(buffer, NumpyKit(), world))
    rows = [world.x[s][t] for s, t in world.arrivals(rank)]
    assert recv.tobytes() == b"".join(row.tobytes() for row in rows)


def with_torch(rank: int, size: int, port: int) -> None:
    """A rank of a torch.distributed job."""
    import torch.distributed as dist

    from kit import TorchKit

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
    kit = TorchKit()
    world = reference.make(63, size)
    buffer = Buffer(dist.new_group(list(range(size))))
    recv, _, _, _, handle, _ = buffer.dispatch(kit.tensor(world.x[rank]), **layout(buffer, kit, world))
    combined, _, _ = buffer.combine(recv, handle)
    outputs = [
        np.stack([world.x[s][t] for s, t in world.arrivals(r)] or [np.zeros(64)]) for r in range(size)
    ]
    expected = reference.combine(world, rank, outputs, [])
    assert kit.array(combined).tobytes() == expected.tobytes()
    dist.barrier()
    dist.destroy_process_group()


def in_processes(work: Any, size: int) -> None:
    """Runs ``work(rank, size, port)`` in processes."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=work, args=(rank, size, port)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * size


def test_processes_meet_by_the_environment() -> None:
    in_processes(from_environment, 3)


@needs_torch
def test_a_torch_group_is_a_group() -> None:
    in_processes(with_torch, 3)

"""Signals, threads, garbage and the end of the interpreter: nothing hangs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import deep_ep
import reference
from deep_ep import Buffer, Group, run_local
from test_high_throughput import layout

# A shell starts its background jobs with Ctrl-C ignored, and every process below inherits that.
PROGRAM = """
import numpy as np, ml_dtypes, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import deep_ep
from deep_ep import Buffer, Group
x = np.zeros((4, 64), ml_dtypes.bfloat16)
idx = np.array([[0, 1]] * 4)
def arguments(buffer):
    ranks, _, experts, routes, _ = buffer.get_dispatch_layout(idx, 2)
    return dict(num_tokens_per_rank=ranks, is_token_in_rank=routes, num_tokens_per_expert=experts)
"""


def start(program: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process that runs ``program``."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ranks(program: str, count: int, port: int) -> list[subprocess.Popen[str]]:
    """As many processes that find each other."""
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_PORT": str(port)}
    return [start(program, RANK=str(rank), **job) for rank in range(count)]


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """Sends Ctrl-C once the process says that it waits; how it ended and how long that took."""
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        pass
    time.sleep(0.3)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors, time.monotonic() - begin


def test_ctrl_c_ends_a_call_that_waits_and_the_peers_call() -> None:
    program = """
group = Group.from_env()
buffer = Buffer(group)
given = arguments(buffer)
print("waiting", flush=True)
if group.rank() == 0:
    try:
        buffer.dispatch(x, **given)
    except KeyboardInterrupt:
        # The memory is no longer in use, and the interpreter is as before.
        print("interrupted"); sys.exit(7)
else:
    time.sleep(1.5)
    try:
        buffer.dispatch(x, **given)
    except (deep_ep.Aborted, deep_ep.PeerLost) as error:
        print("ended", type(error).__name__); sys.exit(8)
"""
    first, second = ranks(program, 2, free_port())
    code, errors, took = interrupted(first)
    assert code == 7, errors
    assert took < 5
    output, errors = second.communicate(timeout=30)
    assert second.returncode == 8, output + errors


@pytest.mark.parametrize("step", ["Group.from_env()", "Buffer(Group.from_env())"])
def test_ctrl_c_ends_waiting_for_ranks_that_never_come(step: str) -> None:
    process = start(
        f'print("waiting", flush=True); {step}',
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    code, errors, took = interrupted(process)
    assert code == -signal.SIGINT and "KeyboardInterrupt" in errors
    assert took < 5


def test_ctrl_c_ends_run_local() -> None:
    process = start(
        """
def rank(group):
    buffer = Buffer(group)
    given = arguments(buffer)
    if group.rank() == 0:
        print("waiting", flush=True)
        buffer.dispatch(x, **given)
    else:
        threading.Event().wait(60)
deep_ep.run_local(rank, 2)
"""
    )
    code, errors, took = interrupted(process)
    assert code == -signal.SIGINT and "KeyboardInterrupt" in errors
    assert took < 8


def test_a_handler_that_does_not_raise_does_not_end_a_call() -> None:
    program = """
import os, signal
group = Group.from_env()
seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
buffer = Buffer(group)
given = arguments(buffer)
if group.rank() == 0:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    buffer.dispatch(x, **given)
    assert seen == [signal.SIGUSR1]
else:
    time.sleep(1.0)
    buffer.dispatch(x, **given)
"""
    for process in ranks(program, 2, free_port()):
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0, output + errors


def test_the_interpreter_ends_while_threads_wait_and_buffers_live() -> None:
    program = """
import gc
ends = Group.local(2)
first = []
def one(group):
    first.append(Buffer(group))
    first[-1].dispatch(x, **arguments(first[-1]))
threads = [threading.Thread(target=one, args=(ends[0],), daemon=True),
           threading.Thread(target=lambda: first.append(Buffer(ends[1])), daemon=True)]
for thread in threads: thread.start()
time.sleep(0.5)
assert len(first) == 2
cycle = [first[0]]; cycle.append(cycle)
print("done", flush=True)
"""
    process = start(program)
    begin = time.monotonic()
    output, errors = process.communicate(timeout=20)
    assert "done" in output, errors
    assert time.monotonic() - begin < 15


def test_a_rank_that_is_killed_is_named() -> None:
    program = """
import os, signal
group = Group.from_env()
buffer = Buffer(group)
given = arguments(buffer)
group.barrier()
if group.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    buffer.dispatch(x, **given)
except deep_ep.PeerLost as error:
    print(error.ranks, error.operation, isinstance(error, ConnectionError))
"""
    first, second = ranks(program, 2, free_port())
    output, errors = first.communicate(timeout=30)
    assert output.strip() == "[1] dispatch True", errors
    second.communicate(timeout=30)


def test_a_deadline_that_passes_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_SECS", "0.5")
    world = reference.make(51, 2)
    done = threading.Event()

    def rank(group: Group) -> None:
        from kit import NumpyKit

        buffer = Buffer(group)
        if group.rank() == 1:
            done.wait(20)
            return
        try:
            with pytest.raises(deep_ep.Timeout) as caught:
                buffer.dispatch(world.x[0], **layout(buffer, NumpyKit(), world))
            error = caught.value
            assert (error.ranks, error.operation, error.stage) == ([1], "dispatch", "counts")
            assert error.waited is not None and error.waited >= 0.5
        finally:
            done.set()

    run_local(rank, 2)


def test_dropping_buffers_needs_no_other_rank() -> None:
    def rank(group: Group) -> None:
        for _ in range(3):
            buffers = [Buffer(group) for _ in range(3)]
            begin = time.monotonic()
            if group.rank() == 0:
                buffers.clear()
                gc.collect()
            assert time.monotonic() - begin < 2
            group.barrier()

    run_local(rank, 3)


def test_destroy_is_explicit(recwarn: pytest.WarningsRecorder) -> None:
    def rank(group: Group) -> None:
        buffer = Buffer(group, explicitly_destroy=True)
        assert buffer.runtime is not None and buffer.runtime.is_available()
        buffer.destroy()
        assert buffer.runtime is None
        with pytest.raises(deep_ep.InvalidArgument):
            buffer.get_dispatch_layout(np.zeros((1, 1), np.int64), 1)
        with pytest.raises(deep_ep.InvalidArgument):
            Buffer(group).destroy()

    run_local(rank, 1)


def test_what_a_rank_raises_comes_out_of_run_local_and_others_stop() -> None:
    world = reference.make(52, 3)

    def rank(group: Group) -> None:
        from kit import NumpyKit

        buffer = Buffer(group)
        if group.rank() == 1:
            raise LookupError("this rank has a fault")
        buffer.dispatch(world.x[group.rank()], **layout(buffer, NumpyKit(), world))

    begin = time.monotonic()
    with pytest.raises(LookupError, match="fault"):
        run_local(rank, 3)
    assert time.monotonic() - begin < 10
    assert run_local(lambda group: group.rank() * 10, 3) == [0, 10, 20]


def test_results_outlive_their_buffer(kit: Any) -> None:
    world = reference.make(53, 2)

    def rank(group: Group) -> Any:
        buffer = Buffer(group)
        x = kit.tensor(world.x[group.rank()])
        return buffer.dispatch(x, **layout(buffer, kit, world))

    results = kit.run(rank, 2)
    gc.collect()
    for me, (recv, _, _, _, handle, _) in enumerate(results):
        rows = [world.x[s][t] for s, t in world.arrivals(me)]
        assert kit.array(recv).tobytes() == b"".join(row.tobytes() for row in rows)
        assert kit.array(handle[3]).tolist() == [t for _, t in world.arrivals(me)]


def test_the_interpreter_runs_while_a_call_waits() -> None:
    world = reference.make(54, 2)
    ticks = []

    def rank(group: Group) -> None:
        from kit import NumpyKit

        buffer = Buffer(group)
        arguments = layout(buffer, NumpyKit(), world)
        if group.rank() == 1:
            for _ in range(20):
                time.sleep(0.01)
                ticks.append(time.monotonic())
        buffer.dispatch(world.x[group.rank()], **arguments)

    run_local(rank, 2)
    assert len(ticks) == 20


def test_local_memory_is_flat_and_stays(kit: Any) -> None:
    def rank(group: Group) -> None:
        buffer = Buffer(group, num_nvl_bytes=1000)
        flat = buffer.get_local_buffer_tensor(kit.dtype("int32"), offset=8)
        assert tuple(flat.shape) == (248,)
        flat[:] = 7
        again = buffer.get_local_buffer_tensor(kit.dtype("bfloat16"))
        assert tuple(again.shape) == (500,)
        again[:] = 0
        assert (kit.array(flat) == 0).all()
        shaped = buffer.get_local_buffer_tensor(kit.dtype("int32"), size=(2, 3))
        assert tuple(shaped.shape) == (2, 3)
        assert tuple(buffer.get_local_buffer_tensor(kit.dtype("int64"), use_rdma_buffer=True).shape) == (
            0,
        )
        assert buffer.num_nvl_bytes == 1000
        del buffer
        gc.collect()
        flat[:] = 1
        assert (kit.array(flat) == 1).all()

    kit.run(rank, 1)

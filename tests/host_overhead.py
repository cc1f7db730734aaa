"""Host time of a call: one rank and one token, so that there is next to nothing to move.

The time inside the native module is shown apart from the rest, which is the package's Python; what the
native module calls back to allocate outputs counts as Python's. On a GPU the calls are enqueued behind a
kernel that keeps it busy, so that they find the GPU as in a program that is ahead of it; a dispatch that
waits for its counts cannot be, and its time is that of the GPU's round trip, too.

python tests/host_overhead.py --engine cuda
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any, Callable

import numpy as np

from common import BF16, HAVE_TORCH, check, gpus

HIDDEN, EXPERTS, TOKENS = 512, 4, 1
#: Calls that are enqueued at a time: a GPU takes about a thousand launches.
BATCH, BATCHES = 50, 20
#: Clock cycles for which a GPU is kept busy: more than a batch takes on the host.
BUSY = 20_000_000


class Timed:
    """An object of the native module, which says how long its methods took."""

    #: Seconds in the native module since it was set to 0.
    inside = 0.0

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.native, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            args = tuple(map(self._outside, args))
            begin = time.perf_counter()
            result = found(*args)
            Timed.inside += time.perf_counter() - begin
            return Timed(result) if hasattr(result, "finish") else result

        return call

    @staticmethod
    def _outside(argument: Any) -> Any:
        """A function that the native module calls, whose time is not its own."""
        if not callable(argument):
            return argument

        def back(*args: Any) -> Any:
            begin = time.perf_counter()
            result = argument(*args)
            Timed.inside -= time.perf_counter() - begin
            return result

        return back


class Program:
    """One rank, its buffer and its tensors."""

    def __init__(self, engine: str) -> None:
        import deep_ep

        group = deep_ep.Group.local(1)[0]
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, HIDDEN, 1, EXPERTS)
        self.cuda = engine == "cuda" and gpus() > 0
        if self.cuda:
            import torch

            torch.cuda.set_stream(torch.cuda.Stream())
        self.buffer = deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True)
        self.x = self.tensor(np.zeros((TOKENS, HIDDEN), BF16))
        self.idx = self.tensor(np.array([[0, 1]] * TOKENS))
        self.weights = self.tensor(np.ones((TOKENS, 2), np.float32))
        ranks, _, experts, routes, _ = self.buffer.get_dispatch_layout(self.idx, EXPERTS)
        self.arguments = {
            "num_tokens_per_rank": ranks,
            "is_token_in_rank": routes,
            "num_tokens_per_expert": experts,
            "topk_idx": self.idx,
            "topk_weights": self.weights,
        }

    def tensor(self, array: np.ndarray) -> Any:
        """A torch tensor if there is torch, on a GPU if that is to be used."""
        if not HAVE_TORCH:
            return array
        import torch

        if array.dtype == BF16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor.cuda() if self.cuda else tensor

    def idle(self) -> None:
        """Waits for the GPU."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def busy(self) -> None:
        """Keeps the GPU busy."""
        if self.cuda:
            import torch

            torch.cuda._sleep(BUSY)

    def show(self, name: str, call: Callable[[], Any], waits: bool = False) -> None:
        """Median microseconds of a call: all, in the native module, outside of it."""
        native, runtime = self.buffer._core, self.buffer.runtime
        assert runtime is not None
        # Asking the clock takes time itself, so the whole is measured without.
        total = self._measure(call, waits)[0]
        runtime.native = Timed(native)
        timed, inside = self._measure(call, waits)
        runtime.native = native
        inside *= total / timed
        note = "waits for the GPU" if waits and self.cuda else ""
        print(f"{name:26}{total:8.1f}{inside:8.1f}{total - inside:8.1f}  {note}".rstrip())

    def _measure(self, call: Callable[[], Any], waits: bool) -> tuple[float, float]:
        """Microseconds of a call, and of its part in the native module if that is timed."""
        times, insides = [], []
        for _ in range(BATCHES):
            self.idle()
            if not waits:
                self.busy()
            for _ in range(BATCH):
                Timed.inside, begin = 0.0, time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
                insides.append(Timed.inside)
        self.idle()
        first = 2 * BATCH
        return statistics.median(times[first:]) * 1e6, statistics.median(insides[first:]) * 1e6

    def high_throughput(self) -> None:
        """Layout, dispatch, combine."""
        buffer, x, idx, arguments = self.buffer, self.x, self.idx, self.arguments
        rows, _, _, counts, handle, _ = buffer.dispatch(x, **arguments)
        check(counts == [TOKENS, TOKENS, 0, 0] and handle is not None, "counts")
        self.show("get_dispatch_layout", lambda: buffer.get_dispatch_layout(idx, EXPERTS))
        self.show("dispatch", lambda: buffer.dispatch(x, **arguments), waits=True)
        self.show("dispatch, cached", lambda: buffer.dispatch(x, handle=handle))
        self.show("dispatch, worst case", lambda: buffer.dispatch(x, num_worst_tokens=8, **arguments))
        worst = buffer.dispatch(x, num_worst_tokens=8, async_finish=True, **arguments)[-1]
        worst.current_stream_wait()
        self.show(
            "dispatch, worst, async",
            lambda: buffer.dispatch(x, num_worst_tokens=8, async_finish=True, **arguments),
        )
        self.show("combine", lambda: buffer.combine(rows, handle))

    def low_latency(self) -> None:
        """Low-latency dispatch and combine."""
        buffer, x, idx, weights = self.buffer, self.x, self.idx, self.weights

        def dispatch(**mode: Any) -> Any:
            result = buffer.low_latency_dispatch(x, idx, 4, EXPERTS, **mode)
            if result[-1] is not None:
                result[-1]()
            return result

        rows, _, route, _, _ = dispatch(use_fp8=False)

        def combine(**mode: Any) -> None:
            hook = buffer.low_latency_combine(rows, idx, weights, route, **mode)[-1]
            if hook is not None:
                hook()

        self.show("low_latency_dispatch", lambda: dispatch(use_fp8=False))
        self.show("low_latency_dispatch fp8", dispatch)
        self.show("low_latency_dispatch hook", lambda: dispatch(return_recv_hook=True))
        self.show("low_latency_combine", combine)
        self.show("low_latency_combine hook", lambda: combine(return_recv_hook=True))


def main() -> None:
    """Measures each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["auto", "cpu", "cuda"], default="auto")
    engine = parser.parse_args().engine
    if engine == "auto":
        engine = "cuda" if gpus() else "cpu"
    os.environ["DEEP_EP_ENGINE"] = engine
    program = Program(engine)
    runtime = program.buffer.runtime
    assert runtime is not None
    kind = "numpy" if not HAVE_TORCH else "torch CUDA" if program.cuda else "torch CPU"
    print(f"{kind} tensors, engine {runtime.engine}")
    print(f"{'us, median':26}{'call':>8}{'native':>8}{'Python':>8}")
    program.high_throughput()
    program.low_latency()


if __name__ == "__main__":
    main()

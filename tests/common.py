"""What the scripts in this folder share: options, ranks, data, timing, tables.

Data are made and checked with numpy; with torch installed the library gets torch tensors (on a GPU
where there is one), else numpy arrays.

Ranks are processes. On GPUs that are fewer than the ranks they are threads of one process instead:
kernels of ranks wait for each other, and those of different processes take turns on a GPU, each for
milliseconds, while those of one process run side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Callable

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
HAVE_TORCH = importlib.util.find_spec("torch") is not None


def options(description: str, **defaults: int) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--num-processes", type=int, default=0, help="ranks on this host (default: the GPUs, else 2)")
    add(
        "--ranks-as",
        choices=["auto", "processes", "threads"],
        default="auto",
        help="what ranks are (auto: processes, but threads of one process where ranks share a GPU, "
        "since kernels of different processes take turns there; without torchrun only)",
    )
    add(
        "--num-tokens",
        "--batch_size",
        type=int,
        default=defaults.get("tokens", 256),
        help="tokens of a rank",
    )
    add(
        "--hidden",
        "--hidden_size",
        type=int,
        default=defaults.get("hidden", 7168),
        help="channels of a token",
    )
    add("--num-topk", type=int, default=8, help="choices of a token")
    add("--num-experts", type=int, default=0, help="experts over all ranks (default: 32 a rank)")
    add("--repeats", type=int, default=20, help="measured calls")
    add("--engine", choices=["auto", "cpu", "cuda"], default="auto", help="what moves the rows")
    return parser


def gpus() -> int:
    """GPUs that torch can use."""
    if not HAVE_TORCH:
        return 0
    import torch

    return int(torch.cuda.device_count())


def main(program: Callable[[Rank], None], arguments: argparse.Namespace) -> None:
    """Runs ``program`` on all ranks and exits with 1 if one failed.

    Under torchrun (LOCAL_RANK is set) this process is one rank. Else it starts ``--num-processes``
    ranks; RANK and WORLD_SIZE, if set, are the number of this host and of all hosts.
    """
    if arguments.engine == "auto":
        arguments.engine = "cuda" if gpus() else "cpu"
    os.environ["DEEP_EP_ENGINE"] = arguments.engine
    # Ranks that share a GPU need queues of their own; CUDA reads this once.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "LOCAL_RANK" in os.environ:
        sys.exit(one(program, arguments))
    count = arguments.num_processes or gpus() or 2
    if as_threads(arguments, count):
        sys.exit(threads(program, arguments, count))
    hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if hosts == 1:
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    context = multiprocessing.get_context("spawn")
    processes = []
    for local in range(count):
        os.environ.update(
            RANK=str(host * count + local),
            WORLD_SIZE=str(hosts * count),
            LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(count),
        )
        processes.append(context.Process(target=start, args=(program, arguments)))
        processes[-1].start()
    for process in processes:
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        print(f"FAILED on ranks {failed}")
    sys.exit(bool(failed))


def as_threads(arguments: argparse.Namespace, count: int) -> bool:
    """Whether ranks are threads of this process."""
    if arguments.ranks_as == "auto":
        return arguments.engine == "cuda" and count > gpus() and "WORLD_SIZE" not in os.environ
    return bool(arguments.ranks_as == "threads")


def threads(program: Callable[[Rank], None], arguments: argparse.Namespace, count: int) -> int:
    """All ranks as threads; returns the exit status."""
    import deep_ep

    try:
        deep_ep.run_local(lambda group: Rank(arguments, group).run(program), count)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(program: Callable[[Rank], None], arguments: argparse.Namespace) -> None:
    """A process of its own."""
    sys.exit(one(program, arguments))


def one(program: Callable[[Rank], None], arguments: argparse.Namespace) -> int:
    """This process's rank; returns the exit status."""
    try:
        import deep_ep

        Rank(arguments, deep_ep.Group.from_env()).run(program)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Inputs:
    """What one rank sends."""

    x: np.ndarray
    idx: np.ndarray
    weights: np.ndarray


@dataclass
class Rank:
    """One rank: its group, its sizes, the inputs of all ranks."""

    arguments: argparse.Namespace
    group: Any
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.me, self.ranks = self.group.rank(), self.group.size()
        self.cuda = self.arguments.engine == "cuda" and gpus() > 0
        self.tokens, self.hidden = self.arguments.num_tokens, self.arguments.hidden
        self.topk = self.arguments.num_topk
        self.experts = self.arguments.num_experts or 32 * self.ranks
        self.local = self.experts // self.ranks
        self.inputs = [self._inputs(rank) for rank in range(self.ranks)]
        self.mine = self.inputs[self.me]

    def run(self, program: Callable[[Rank], None]) -> None:
        """Runs the program, on a GPU with a stream of this rank as the current one."""
        if not self.cuda:
            return program(self)
        import torch

        torch.cuda.set_device(self.group.local_rank() % gpus())
        with torch.cuda.stream(torch.cuda.Stream()):
            self._load_kernels()
            program(self)
            self.synchronize()

    def _load_kernels(self) -> None:
        """Lets CUDA load kernels of torch now: later that may wait for kernels that wait for us."""
        import torch

        for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.uint8):
            some = torch.zeros(16, 16, dtype=dtype, device="cuda")
            some.T.contiguous().fill_(1)
            some[:, :8] = some[:, 8:]
        self.synchronize()
        self.group.barrier()

    def _inputs(self, rank: int) -> Inputs:
        rng = np.random.default_rng(1000 + rank)
        # Ranks have different numbers of tokens, and some choices are missing.
        count = max(self.tokens - rank, 0)
        x = rng.standard_normal((count, self.hidden), np.float32).astype(BF16)
        idx = rng.random((count, self.experts)).argsort(axis=1)[:, : self.topk].astype(np.int64)
        idx[rng.random(idx.shape) < 0.02] = -1
        return Inputs(x, idx, rng.random(idx.shape, np.float32))

    def tensor(self, array: np.ndarray) -> Any:
        """A tensor for the library, with the bits of ``array``."""
        if not HAVE_TORCH:
            return array
        import torch

        views = {BF16: (np.int16, torch.bfloat16), FP8: (np.uint8, torch.float8_e4m3fn)}
        plain, dtype = views.get(array.dtype, (array.dtype, None))
        tensor = torch.from_numpy(np.ascontiguousarray(array).view(plain))
        tensor = tensor if dtype is None else tensor.view(dtype)
        return tensor.cuda() if self.cuda else tensor

    def array(self, tensor: Any) -> np.ndarray:
        """The bits of a tensor of the library."""
        if isinstance(tensor, np.ndarray):
            return tensor
        import torch

        views = {torch.bfloat16: (torch.int16, BF16), torch.float8_e4m3fn: (torch.uint8, FP8)}
        plain, dtype = views.get(tensor.dtype, (tensor.dtype, None))
        array = tensor.detach().cpu().view(plain).numpy()
        return array if dtype is None else array.view(dtype)

    def synchronize(self) -> None:
        """Waits for this rank's work on the GPU; not for a peer's, which may wait for this rank."""
        if self.cuda:
            import torch

            torch.cuda.current_stream().synchronize()

    def hosted(self, rank: int) -> range:
        """The experts of a rank."""
        return range(rank * self.local, (rank + 1) * self.local)

    def arrivals(self) -> list[np.ndarray]:
        """The tokens of each source that come to this rank."""
        mine = self.hosted(self.me)
        here = [((i.idx >= mine.start) & (i.idx < mine.stop)).any(axis=1) for i in self.inputs]
        return [np.flatnonzero(tokens) for tokens in here]

    def measure(self, call: Callable[[], Any], warmup: int = 3) -> np.ndarray:
        """Seconds of each call on this rank, all ranks starting together."""
        times = []
        for _ in range(warmup + self.arguments.repeats):
            self.synchronize()
            self.group.barrier()
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return np.array(times[warmup:])

    def report(self, name: str, times: np.ndarray, received: float, note: str = "") -> None:
        """Adds a line: the slowest rank's median and 99th percentile, bytes and speed.

        Collective. ``received`` are the bytes that this rank gets in a call.
        """
        mine = [float(np.median(times)), float(np.percentile(times, 99)), received]
        all_ = [json.loads(data) for data in self.group.all_gather(json.dumps(mine).encode())]
        median, late = max(each[0] for each in all_), max(each[1] for each in all_)
        most = max(each[2] for each in all_)
        self.rows.append(
            (name, f"{median * 1e6:,.1f}", f"{late * 1e6:,.1f}", f"{most / 1e6:,.2f}",
             f"{most / median / 1e9:.2f}", note)
        )  # fmt: skip

    def table(self, title: str) -> None:
        """Prints the lines on rank 0."""
        if self.me:
            return
        head = ("call", "median us", "p99 us", "MB received", "GB/s", "")
        lines = [head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        sizes = (
            f"{self.ranks} ranks, {self.tokens} tokens, hidden {self.hidden}, "
            f"top-{self.topk} of {self.experts} experts, engine {self.arguments.engine}"
        )
        print(f"{title}: {sizes}")
        for number, line in enumerate(lines):
            cells = [
                line[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(line[1:5], widths[1:5])),
                line[5],
            ]
            print("  ".join(cells).rstrip())
            if number == 0:
                print("  ".join("-" * width for width in widths[:5]))
        print("every row, count and sum was compared: all are right", flush=True)


def check(holds: Any, what: str) -> None:
    """Ends this rank unless a comparison held."""
    if not bool(holds):
        raise AssertionError(f"WRONG: {what}")


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """``1 - 2<a,b>/(<a,a>+<b,b>)``: 0 for equal tensors."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    norms = float(a @ a + b @ b)
    return 0.0 if norms == 0 else 1 - 2 * float(a @ b) / norms


def cast_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FP8 codes and a float32 scale per 128 channels."""
    blocks = x.astype(np.float32).reshape(x.shape[0], x.shape[1] // 128, 128)
    amax = np.maximum(np.abs(blocks).max(axis=2), np.float32(1e-4))
    codes = np.clip(blocks * (np.float32(448) / amax)[:, :, None], -448, 448).astype(FP8)
    return codes.reshape(x.shape), amax * np.float32(1 / 448)


def decode_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 values of FP8 rows."""
    blocks = codes.astype(np.float32).reshape(*codes.shape[:-1], codes.shape[-1] // 128, 128)
    return (blocks * scales[..., None]).reshape(codes.shape)

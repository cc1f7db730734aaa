"""Host time of a call: one rank and one token, so that there is next to nothing to move.

python tests/host_overhead.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Callable

import numpy as np

import deep_ep
from common import BF16, HAVE_TORCH, check

HIDDEN, EXPERTS, CALLS = 64, 4, 2000


def tensor(array: np.ndarray) -> Any:
    """A torch tensor if there is torch."""
    if not HAVE_TORCH:
        return array
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def show(name: str, call: Callable[[], Any]) -> None:
    """Median microseconds of a call."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    print(f"{name:24} {statistics.median(times[CALLS // 10 :]) * 1e6:7.1f} us")


def main() -> None:
    """Measures each call."""
    group = deep_ep.Group.local(1)[0]
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, HIDDEN, 1, EXPERTS)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True)
    x = tensor(np.zeros((1, HIDDEN), BF16))
    idx, weights = tensor(np.array([[0, 1]])), tensor(np.ones((1, 2), np.float32))
    ranks, _, experts, routes, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    arguments = {
        "num_tokens_per_rank": ranks,
        "is_token_in_rank": routes,
        "num_tokens_per_expert": experts,
        "topk_idx": idx,
        "topk_weights": weights,
    }
    rows, _, _, counts, handle, _ = buffer.dispatch(x, **arguments)
    check(counts == [1, 1, 0, 0] and handle is not None, "counts")
    assert handle is not None
    low, _, route, _, _ = buffer.low_latency_dispatch(x, idx, 4, EXPERTS, use_fp8=False)
    print(f"{'torch' if HAVE_TORCH else 'numpy'} tensors, engine {buffer.runtime.engine}")
    show("get_dispatch_layout", lambda: buffer.get_dispatch_layout(idx, EXPERTS))
    show("dispatch", lambda: buffer.dispatch(x, **arguments))
    show("dispatch, cached", lambda: buffer.dispatch(x, handle=handle))
    show("combine", lambda: buffer.combine(rows, handle))
    show("low_latency_dispatch", lambda: buffer.low_latency_dispatch(x, idx, 4, EXPERTS, use_fp8=False))
    show("low_latency_combine", lambda: buffer.low_latency_combine(low, idx, weights, route))


if __name__ == "__main__":
    main()

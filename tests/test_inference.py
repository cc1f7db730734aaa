"""A decode step: dispatch, experts, combine on the low-latency path; time per batch."""

from __future__ import annotations

from typing import Any

import numpy as np

import deep_ep
from common import Rank, check, difference, main, options


def program(rank: Rank) -> None:
    """One rank."""
    sizes = (max(rank.tokens, 1), rank.hidden, rank.ranks, rank.experts)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes)
    buffer = deep_ep.Buffer(rank.group, num_rdma_bytes=hint, low_latency_mode=True)
    x, idx, weights = map(rank.tensor, (rank.mine.x, rank.mine.idx, rank.mine.weights))
    # A router's weights add up to one.
    chosen = np.where(rank.mine.idx >= 0, rank.mine.weights, 0)
    sums = chosen.sum(axis=1, keepdims=True)

    def batch() -> Any:
        recv, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, sizes[0], rank.experts, use_fp8=False, return_recv_hook=True
        )
        # The attention of another micro-batch would run here.
        hook()
        # The experts of this step give back what they got.
        combined, _, hook = buffer.low_latency_combine(recv, idx, weights, handle, return_recv_hook=True)
        hook()
        return combined

    combined = batch()
    found = difference(rank.array(combined), rank.mine.x.astype(np.float64) * sums)
    check(found < 1e-5, f"a batch's result differs by {found:.2e}")
    times = rank.measure(batch, warmup=10)
    received = (
        sum(len(t) for t in rank.arrivals()) * rank.hidden * 2 + len(rank.mine.x) * rank.hidden * 2
    )
    rank.report("batch (dispatch + combine)", times, received)
    rank.table("inference")


if __name__ == "__main__":
    parser = options("A decode step on the low-latency path", tokens=128)
    parser.set_defaults(repeats=100)
    main(program, parser.parse_args())

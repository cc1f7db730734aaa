"""High-throughput dispatch and combine inside a node: checks every row, then measures."""

from __future__ import annotations

from typing import Any

import numpy as np

import deep_ep
from common import BF16, Rank, cast_fp8, check, main, options


def dispatch_arguments(rank: Rank, buffer: deep_ep.Buffer) -> dict[str, Any]:
    """Counts and routes of this rank, checked."""
    idx = rank.tensor(rank.mine.idx)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, rank.experts)
    for r in range(rank.ranks):
        hosted = rank.hosted(r)
        goes = ((rank.mine.idx >= hosted.start) & (rank.mine.idx < hosted.stop)).any(axis=1)
        check((rank.array(in_rank)[:, r] == goes).all(), f"tokens for rank {r}")
        check(rank.array(per_rank)[r] == goes.sum(), f"number of tokens for rank {r}")
    counts = np.bincount(rank.mine.idx[rank.mine.idx >= 0], minlength=rank.experts)
    check((rank.array(per_expert) == counts).all(), "choices of each expert")
    return {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": idx,
        "topk_weights": rank.tensor(rank.mine.weights),
    }


def check_received(rank: Rank, x: list[np.ndarray], received: Any, what: str) -> None:
    """Rows of all sources in order."""
    expected = np.concatenate([rows[tokens] for rows, tokens in zip(x, rank.arrivals())])
    got = rank.array(received)[: len(expected)]
    check(got.tobytes() == expected.tobytes(), what)


def check_choices(rank: Rank, idx: Any, weights: Any, counts: list[int]) -> None:
    """Choices and weights that came with the rows, and the counts of experts."""
    first = rank.hosted(rank.me).start
    theirs = np.concatenate([i.idx[t] for i, t in zip(rank.inputs, rank.arrivals())]) - first
    local = np.where((theirs >= 0) & (theirs < rank.local), theirs, -1)
    check((rank.array(idx) == local).all(), "received choices")
    given = np.concatenate([i.weights[t] for i, t in zip(rank.inputs, rank.arrivals())])
    check((rank.array(weights) == np.where(local >= 0, given, 0)).all(), "received weights")
    expected = np.bincount(local[local >= 0], minlength=rank.local)
    check(counts == expected.tolist(), "received counts of experts")


def check_combined(rank: Rank, combined: Any, weights: Any) -> None:
    """Each rank sent back what it got, so a sum has as many terms as ranks."""
    idx = rank.mine.idx
    goes = np.stack(
        [((idx >= h.start) & (idx < h.stop)).any(axis=1) for h in map(rank.hosted, range(rank.ranks))]
    ).sum(axis=0)
    expected = (rank.mine.x.astype(np.float32) * goes[:, None]).astype(BF16)
    got = rank.array(combined).astype(np.float32)
    # The sum of equal terms is rounded once; with many ranks float32 may round, too.
    close = np.abs(got - expected.astype(np.float32)) <= np.abs(got) * 2**-7
    check(close.all(), "combined rows")
    chosen = np.where(idx >= 0, rank.mine.weights, 0)
    check((rank.array(weights) == chosen).all(), "combined weights")


def program(rank: Rank) -> None:
    """One rank."""
    buffer = deep_ep.Buffer(rank.group)
    x = rank.tensor(rank.mine.x)
    arguments = dispatch_arguments(rank, buffer)
    recv, idx, weights, counts, handle, _ = buffer.dispatch(x, **arguments)
    assert handle is not None and counts is not None
    check_received(rank, [i.x for i in rank.inputs], recv, "rows")
    check_choices(rank, idx, weights, counts)
    combined, combined_weights, _ = buffer.combine(recv, handle, topk_weights=weights)
    check_combined(rank, combined, combined_weights)
    cached = buffer.dispatch(x, handle=handle)[0]
    check_received(rank, [i.x for i in rank.inputs], cached, "rows along cached routes")
    worst = sum(len(i.x) for i in rank.inputs)
    padded = buffer.dispatch(x, num_worst_tokens=worst, **arguments)
    check_received(rank, [i.x for i in rank.inputs], padded[0], "rows with worst-case outputs")
    rows = sum(map(len, rank.arrivals()))
    check((rank.array(padded[1])[rows:] == -1).all(), "choices behind the last row")

    size = rows * rank.hidden * 2
    if rank.hidden % 128 == 0:
        casts = [cast_fp8(i.x) for i in rank.inputs]
        pair = (rank.tensor(casts[rank.me][0]), rank.tensor(casts[rank.me][1]))
        codes, scales = buffer.dispatch(pair, handle=handle)[0]
        check_received(rank, [c for c, _ in casts], codes, "fp8 rows")
        check_received(rank, [s for _, s in casts], scales, "scales")
        times = rank.measure(lambda: buffer.dispatch(pair, **arguments))
        rank.report("dispatch fp8", times, rows * rank.hidden * (1 + 4 / 128))
    rank.report("dispatch bf16", rank.measure(lambda: buffer.dispatch(x, **arguments)), size)
    rank.report("dispatch bf16, cached", rank.measure(lambda: buffer.dispatch(x, handle=handle)), size)
    rank.report("combine bf16", rank.measure(lambda: buffer.combine(recv, handle)), size)
    rank.table("intranode")


if __name__ == "__main__":
    main(program, options("High-throughput dispatch and combine inside a node").parse_args())

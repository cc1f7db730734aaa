"""Low-latency dispatch and combine: checks every row, then measures."""

from __future__ import annotations

from typing import Any

import numpy as np

import deep_ep
from common import Rank, cast_fp8, check, decode_fp8, difference, main, options


def arrivals(rank: Rank, local: int) -> list[tuple[int, np.ndarray]]:
    """The tokens of each source that come to one of this rank's experts."""
    expert = rank.hosted(rank.me)[local]
    return [
        (source, np.flatnonzero((inputs.idx == expert).any(axis=1)))
        for source, inputs in enumerate(rank.inputs)
    ]


def check_rows(rank: Rank, values: Any, count: Any, handle: tuple[Any, ...], what: str) -> int:
    """Rows, counts and handle; ``values(local, rows, inputs, tokens)`` compares rows."""
    info, layout = rank.array(handle[0]), rank.array(handle[1])
    total = 0
    for local in range(rank.local):
        begin = 0
        for source, tokens in arrivals(rank, local):
            rows = slice(begin, begin + len(tokens))
            check(layout[local, source] == (begin << 32 | len(tokens)), f"{what}: layout_range")
            check((info[local, rows] == tokens).all(), f"{what}: src_info")
            check(values(local, rows, rank.inputs[source], tokens), f"{what}: rows")
            begin += len(tokens)
        check(rank.array(count)[local] == begin, f"{what}: recv_count")
        total += begin
    return total


def check_combined(rank: Rank, combined: Any, what: str, limit: float) -> None:
    """Experts sent back what they got, so a result is the token times its weights."""
    weights = np.where(rank.mine.idx >= 0, rank.mine.weights, 0).sum(axis=1, keepdims=True)
    expected = rank.mine.x.astype(np.float64) * weights
    got = rank.array(combined)
    check(np.isfinite(got.astype(np.float32)).all(), f"{what}: finite")
    found = difference(got, expected)
    check(found < limit, f"{what}: differs by {found:.2e}, limit {limit:.0e}")


def program(rank: Rank) -> None:
    """One rank."""
    sizes = (max(rank.tokens, 1), rank.hidden, rank.ranks, rank.experts)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes)
    buffer = deep_ep.Buffer(rank.group, num_rdma_bytes=hint, low_latency_mode=True)
    x, idx, weights = map(rank.tensor, (rank.mine.x, rank.mine.idx, rank.mine.weights))

    def dispatch(**mode: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, sizes[0], rank.experts, **mode)

    recv, count, handle, _, hook = dispatch(use_fp8=False, return_recv_hook=True)
    hook()
    plain = rank.array(recv)
    rows = check_rows(
        rank,
        lambda e, at, inputs, t: plain[e, at].tobytes() == inputs.x[t].tobytes(),
        count, handle, "bf16",
    )  # fmt: skip
    rank.report("dispatch bf16", rank.measure(lambda: dispatch(use_fp8=False)), rows * rank.hidden * 2)
    if rank.hidden % 128 == 0:
        (codes, scales), count, handle8, _, _ = dispatch()
        codes, scales = rank.array(codes), rank.array(scales)

        def same(e: int, at: slice, inputs: Any, tokens: np.ndarray) -> bool:
            expected = cast_fp8(inputs.x[tokens])
            got = (codes[e, at], scales[e, at])
            return difference(decode_fp8(*got), decode_fp8(*expected)) < 1e-6

        check_rows(rank, same, count, handle8, "fp8")
        rank.report("dispatch fp8", rank.measure(dispatch), rows * rank.hidden * (1 + 4 / 128))
    if rank.hidden % 512 == 0:
        rank.report(
            "dispatch fp8, packed exponents",
            rank.measure(lambda: dispatch(round_scale=True, use_ue8m0=True)),
            rows * rank.hidden * (1 + 1 / 128),
        )

    def combine(**mode: Any) -> Any:
        combined, _, hook = buffer.low_latency_combine(recv, idx, weights, handle, **mode)
        if hook is not None:
            hook()
        return combined

    def in_place() -> Any:
        buffer.get_next_low_latency_combine_buffer(handle)[:] = recv
        return combine(zero_copy=True)

    back = len(rank.mine.x) * rank.hidden * 2
    for name, call, limit in (
        ("combine", combine, 1e-5),
        ("combine, hook", lambda: combine(return_recv_hook=True), 1e-5),
        ("combine, zero copy (with filling)", in_place, 1e-5),
        ("combine, LogFMT", lambda: combine(use_logfmt=True), 2e-5),
    ):
        check_combined(rank, call(), name, limit)
        rank.report(name, rank.measure(call), back)
    rank.table("low latency")


if __name__ == "__main__":
    main(program, options("Low-latency dispatch and combine", tokens=128).parse_args())

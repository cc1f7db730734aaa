"""FP8 rows against bf16 rows: speed, bytes, error."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

import deep_ep
from common import Rank, cast_fp8, check, decode_fp8, difference, main, options
from test_intranode import dispatch_arguments

#: An E4M3 value has 3 bits behind the point: half a unit is at most 1/16 of it.
RELATIVE = 1 / 16


def errors(got: np.ndarray, expected: np.ndarray) -> str:
    """Error figures of FP8 rows, which must be those of the format."""
    amax = np.abs(expected).reshape(*expected.shape[:-1], -1, 128).max(axis=-1, keepdims=True)
    apart = np.abs(got - expected).reshape(*amax.shape[:-1], 128)
    # Small values of a block have an absolute error: the smallest step, as a part of the largest.
    bound = np.maximum(np.abs(expected).reshape(apart.shape) * RELATIVE, amax * 2.0**-10 / 448)
    check((apart <= bound * 1.001).all(), "an fp8 value is not the nearest one")
    found = difference(got, expected)
    check(found < 1e-3, f"fp8 rows differ by {found:.2e}")
    return f"difference {found:.1e}, largest {float(apart.max(initial=0)):.2e}"


def copied(rank: Rank, buffer: deep_ep.Buffer, call: Callable[[], Any], counter: str) -> float:
    """Bytes that a call of this rank adds to a counter."""
    before = buffer.statistics()[counter]
    call()
    rank.synchronize()
    return float(buffer.statistics()[counter] - before)


def high_throughput(rank: Rank, buffer: deep_ep.Buffer) -> None:
    """Rows that are cast by the caller."""
    arguments = dispatch_arguments(rank, buffer)
    x = rank.tensor(rank.mine.x)
    casts = [cast_fp8(i.x) for i in rank.inputs]
    pair = (rank.tensor(casts[rank.me][0]), rank.tensor(casts[rank.me][1]))
    recv, _, _, _, handle, _ = buffer.dispatch(x, **arguments)
    codes, scales = buffer.dispatch(pair, handle=handle)[0]
    rows = rank.array(recv).astype(np.float32)
    note = errors(decode_fp8(rank.array(codes), rank.array(scales)), rows)
    size = rows.shape[0] * rank.hidden
    for name, data, bytes_, text in (
        ("dispatch bf16", x, size * 2, ""),
        ("dispatch fp8", pair, size * (1 + 4 / 128), note),
    ):
        rank.report(
            name, rank.measure(lambda data=data: buffer.dispatch(data, **arguments)), bytes_, text
        )


def low_latency(rank: Rank, buffer: deep_ep.Buffer) -> None:
    """Rows that are cast by the call."""
    most = max(rank.tokens, 1)
    x, idx = rank.tensor(rank.mine.x), rank.tensor(rank.mine.idx)

    def call(**mode: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, most, rank.experts, **mode)

    plain, count, _, _, _ = call(use_fp8=False)
    used = np.arange(plain.shape[1])[None, :] < rank.array(count)[:, None]
    expected = rank.array(plain)[used].astype(np.float32)
    bf16 = copied(rank, buffer, lambda: call(use_fp8=False), "wire_bytes")
    rank.report("low-latency bf16", rank.measure(lambda: call(use_fp8=False)), bf16)
    for name, mode in (
        ("low-latency fp8", {}),
        ("low-latency fp8, powers of two", {"round_scale": True}),
    ):
        (codes, scales), *_ = call(**mode)
        got = decode_fp8(rank.array(codes)[used], rank.array(scales)[used])
        # With powers of two a block uses at least half of the codes' range.
        note = errors(got, expected) if not mode else f"difference {difference(got, expected):.1e}"
        fp8 = copied(rank, buffer, lambda mode=mode: call(**mode), "wire_bytes")
        check(bf16 == 0 or fp8 / bf16 < 0.6, f"fp8 takes {fp8 / max(bf16, 1):.2f} of the bytes of bf16")
        rank.report(name, rank.measure(lambda mode=mode: call(**mode)), fp8, note)


def program(rank: Rank) -> None:
    """One rank."""
    check(rank.hidden % 128 == 0, "--hidden must be a multiple of 128 for fp8")
    sizes = (max(rank.tokens, 1), rank.hidden, rank.ranks, rank.experts)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes)
    buffer = deep_ep.Buffer(rank.group, num_rdma_bytes=hint, low_latency_mode=True)
    high_throughput(rank, buffer)
    low_latency(rank, buffer)
    rank.table("fp8")


if __name__ == "__main__":
    main(program, options("FP8 rows against bf16 rows", tokens=128).parse_args())

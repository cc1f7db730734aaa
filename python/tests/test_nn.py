"""Gradients, and the layer against one that is in one place."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import deep_ep
from conftest import HAVE_TORCH
from deep_ep import Buffer, Group

pytestmark = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_of_dispatch_and_combine_are_those_of_the_sum_they_compute(
    torch_kit: Any, ranks: int
) -> None:
    import torch

    from deep_ep.nn import combine, dispatch

    device = torch_kit.device
    experts, top_k, tokens, hidden = 2 * ranks, 3, 5, 8

    def rank(group: Group) -> None:
        me = group.rank()
        buffer = Buffer(group)
        generator = torch.Generator().manual_seed(me)
        x = torch.randn(tokens + me, hidden, generator=generator).to(device).requires_grad_()
        idx = torch.randint(-1, experts, (tokens + me, top_k), generator=generator).to(device)
        weights = torch.rand(tokens + me, top_k, generator=generator).to(device).requires_grad_()
        recv, recv_idx, recv_weights, counts, handle = dispatch(x, idx, weights, buffer, experts)
        assert sum(counts) == int((recv_idx >= 0).sum())
        # Expert e multiplies by e + 1.
        factors = torch.where(recv_idx >= 0, recv_idx + 1 + me * 2, 0) * recv_weights
        result = combine(recv * factors.sum(1, keepdim=True), buffer, handle)
        up = torch.randn(result.shape, generator=generator).to(device)
        (result * up).sum().backward()

        x2, w2 = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
        expected = x2 * (torch.where(idx >= 0, idx + 1, 0) * w2).sum(1, keepdim=True)
        (expected * up).sum().backward()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(x.grad, x2.grad)
        torch.testing.assert_close(weights.grad, w2.grad)

    torch_kit.run(rank, ranks)


def test_decoding_gives_what_training_gives(torch_kit: Any) -> None:
    import torch

    from deep_ep.nn import MoELayer

    device = torch.device(torch_kit.device)
    most, hidden, experts = 6, 64, 4

    def rank(group: Group) -> None:
        size = Buffer.get_low_latency_rdma_size_hint(most, hidden, group.size(), experts)
        buffer = Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
        torch.manual_seed(group.rank())
        layer = MoELayer(buffer, hidden, 32, experts, 2, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            layer.router.weight.copy_(torch.linspace(-1, 1, experts * hidden).view(experts, hidden))
        x = torch.randn(most - group.rank(), hidden).bfloat16().to(device)
        torch.testing.assert_close(layer.decode(x, most), layer(x).detach(), rtol=0.05, atol=0.02)

    # One rank first: torch's kernels are loaded while no other waits.
    torch_kit.run(rank, 1)
    torch_kit.run(rank, 2)


def test_training_matches_a_dense_layer(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train_moe.py", "--steps", "5"])
    runpy.run_path(str(ROOT / "examples/train_moe.py"), run_name="__main__")
    assert "losses and weights are those" in capsys.readouterr().out
    assert deep_ep.Buffer.num_sms == 20

"""Trains a small MoE layer on ranks that are threads of this process.

The same training in one process, with all experts in one place, must give the same losses and
weights.

    python examples/train_moe.py
    python examples/train_moe.py --device cuda
"""

from __future__ import annotations

import argparse
import os

import torch

import deep_ep
from deep_ep.nn import Experts, MoELayer

RANKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 8, 2, 32, 48, 24
RATE = 0.5


#: Set by ``--device``.
DEVICE = "cpu"


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(TOKENS + rank, HIDDEN, generator=generator)
    return x.to(DEVICE), torch.roll(x, 1, dims=1).sin().to(DEVICE)


def initial() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of the router and of all experts."""
    generator = torch.Generator().manual_seed(7)
    router = torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.2
    w1 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=generator) * INTERMEDIATE**-0.5
    return router.to(DEVICE), w1.to(DEVICE), w2.to(DEVICE)


def on_its_device(group: deep_ep.Group, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """One rank's training, on a GPU with a stream of its own, so that no rank waits for another's."""
    if DEVICE == "cpu":
        return distributed(group, steps)
    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    with torch.cuda.stream(torch.cuda.Stream()):
        return distributed(group, steps)


def distributed(group: deep_ep.Group, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """One rank's training: its losses, and the router's and its experts' weights."""
    rank = group.rank()
    device = torch.device(DEVICE)
    layer = MoELayer(deep_ep.Buffer(group), HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, device=device)
    local = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
    router, w1, w2 = initial()
    with torch.no_grad():
        layer.router.weight.copy_(router)
        layer.experts.w1.copy_(w1[local])
        layer.experts.w2.copy_(w2[local])
    losses = []
    for step in range(steps):
        x, target = data(rank, step)
        loss = ((layer(x) - target) ** 2).sum() / (TOKENS * RANKS * HIDDEN)
        layer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            # The router is on every rank: its gradient is the sum over them.
            gradient = layer.router.weight.grad
            assert gradient is not None
            parts = group.all_gather(gradient.cpu().numpy().tobytes())
            whole = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts]
            layer.router.weight -= RATE * torch.stack(whole).sum(0).view_as(gradient).to(DEVICE)
            for weight in layer.experts.parameters():
                assert weight.grad is not None
                weight -= RATE * weight.grad
    weights = (layer.router.weight, layer.experts.w1, layer.experts.w2)
    return losses, [weight.detach().cpu() for weight in weights]


def dense(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """The same training in one place: every expert sees every token."""
    router, w1, w2 = (weight.requires_grad_() for weight in initial())
    experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, device=torch.device(DEVICE))
    losses = []
    for step in range(steps):
        batches = [data(rank, step) for rank in range(RANKS)]
        x, target = (torch.cat(parts) for parts in zip(*batches))
        scores = (x @ router.T).softmax(dim=-1)
        weights, idx = scores.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        gate = torch.zeros_like(scores).scatter(1, idx, weights)
        with torch.no_grad():
            experts.w1.copy_(w1)
            experts.w2.copy_(w2)
        every = torch.stack([torch.nn.functional.silu(x @ w1[e]) @ w2[e] for e in range(EXPERTS)], dim=1)
        result = (every * gate[:, :, None]).sum(dim=1)
        loss = ((result - target) ** 2).sum() / (TOKENS * RANKS * HIDDEN)
        gradients = torch.autograd.grad(loss, (router, w1, w2))
        losses.append(loss.item())
        with torch.no_grad():
            for weight, gradient in zip((router, w1, w2), gradients):
                weight -= RATE * gradient
    return losses, [weight.detach().cpu() for weight in (router, w1, w2)]


def warm_up() -> None:
    """Uses torch's kernels once, without other ranks: CUDA loads them at their first use."""
    generator = torch.Generator().manual_seed(3)
    idx = torch.randint(-1, 1, (TOKENS, TOP_K), generator=generator).to(DEVICE)
    experts = Experts(1, HIDDEN, INTERMEDIATE, device=torch.device(DEVICE))
    x, _ = data(0, 0)
    x.requires_grad_()
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(DEVICE).requires_grad_()
    experts(x, idx, weights).square().sum().backward()
    torch.cuda.synchronize()


def main() -> None:
    """Trains both ways and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    global DEVICE
    DEVICE, steps = arguments.device, arguments.steps
    # Ranks that share a GPU need queues of their own; CUDA reads this once.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # First: what it makes CUDA load need not be loaded while ranks wait for each other.
    expected, weights = dense(steps)
    if DEVICE == "cuda":
        warm_up()
    ranks = deep_ep.run_local(lambda group: on_its_device(group, steps), RANKS)
    losses = [sum(parts) for parts in zip(*(losses for losses, _ in ranks))]
    for step, (one, other) in enumerate(zip(losses, expected)):
        print(f"step {step:3}  loss {one:.6f}  in one process {other:.6f}")
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    router, w1, w2 = weights
    for _, (mine, *_) in ranks:
        torch.testing.assert_close(mine, router, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.cat([w[1] for _, w in ranks]), w1, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.cat([w[2] for _, w in ranks]), w2, rtol=1e-3, atol=1e-4)
    assert losses[-1] < losses[0], "the loss did not fall"
    print("losses and weights are those of the training in one process")


if __name__ == "__main__":
    main()

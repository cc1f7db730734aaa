"""Layers for torch: dispatch and combine with gradients, and a small MoE layer.

The gradient of dispatch is combine, and that of combine is dispatch, along the same handle. Importing
this module needs torch.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ._buffer import Buffer
from ._config import Config

__all__ = ["Experts", "MoELayer", "combine", "dispatch"]


class _Dispatch(torch.autograd.Function):
    """Rows and weights to the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        num_experts: int,
        config: Optional[Config],
        route: list[Any],
    ) -> tuple[Tensor, Tensor]:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
            x.detach(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights.detach(),
            config=config,
        )
        ctx.buffer, ctx.handle = buffer, handle
        route[:] = [recv_idx, counts, handle]
        return recv_x, recv_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:
        of_x, of_weights = gradients
        x, weights, _ = ctx.buffer.combine(
            of_x.contiguous(), ctx.handle, topk_weights=of_weights.float().contiguous()
        )
        return x, None, weights, None, None, None, None


class _Combine(torch.autograd.Function):
    """Rows back to their owners, summed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, buffer: Buffer, handle: tuple[Any, ...], config: Optional[Config]
    ) -> Tensor:
        combined, _, _ = buffer.combine(x.detach().contiguous(), handle, config=config)
        ctx.buffer, ctx.handle, ctx.rows = buffer, handle, x.shape[0]
        return combined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:
        x = ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0]
        return x, None, None, None


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: Buffer,
    num_experts: int,
    config: Optional[Config] = None,
) -> tuple[Tensor, Tensor, Tensor, list[int], tuple[Any, ...]]:
    """Sends rows to the ranks of their experts. Collective, as is its backward pass.

    Args:
        x: ``[T, H]`` bf16, float32 or float16; has a gradient.
        topk_idx: ``[T, K]`` chosen experts.
        topk_weights: ``[T, K]`` float32; has a gradient.
        buffer: the buffer, in forward and backward pass.
        num_experts: ``E``.
        config: settings.

    Returns:
        ``recv_x`` ``[N, H]``, ``recv_topk_idx`` ``[N, K]`` (local experts, -1 for others),
        ``recv_topk_weights`` ``[N, K]``, rows of each local expert, and the handle.
    """
    route: list[Any] = []
    recv_x, recv_weights = _Dispatch.apply(x, topk_idx, topk_weights, buffer, num_experts, config, route)
    recv_idx, counts, handle = route
    return recv_x, recv_idx, recv_weights, counts, handle


def combine(
    x: Tensor, buffer: Buffer, handle: tuple[Any, ...], config: Optional[Config] = None
) -> Tensor:
    """Brings rows back and sums them without weights. Collective, as is its backward pass.

    Args:
        x: ``[N, H]`` bf16, float32 or float16; has a gradient.
        buffer: the buffer, in forward and backward pass.
        handle: of the dispatch.
        config: settings.

    Returns:
        ``[T, H]``.
    """
    return _Combine.apply(x, buffer, handle, config)


class Experts(nn.Module):
    """The feed-forward experts of one rank: ``silu(x @ w1) @ w2``."""

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        dtype: Optional[torch.dtype] = None,
        device: Optional[torch.device] = None,
    ) -> None:
        """Weights ``[E/R, H, F]`` and ``[E/R, F, H]``."""
        super().__init__()
        options: Any = {"dtype": dtype, "device": device}
        self.w1 = nn.Parameter(torch.empty(num_local_experts, hidden, intermediate, **options))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, intermediate, hidden, **options))
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def expert(self, x: Tensor, number: int) -> Tensor:
        """Rows ``[n, H]`` through one local expert."""
        return torch.nn.functional.silu(x @ self.w1[number]) @ self.w2[number]

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        """Received rows ``[N, H]`` through their experts.

        Args:
            x: ``[N, H]``.
            idx: ``[N, K]`` local experts, -1 for none.
            weights: ``[N, K]``.

        Returns:
            ``[N, H]``, the weighted sum over the local experts of each row.
        """
        result = torch.zeros_like(x)
        for number in range(self.w1.shape[0]):
            chosen = idx == number
            rows = chosen.any(dim=1).nonzero().squeeze(1)
            # Also without rows, so that every weight has a gradient on every rank.
            factor = torch.where(chosen[rows], weights[rows], 0).sum(dim=1, keepdim=True)
            result = result.index_add(0, rows, self.expert(x[rows], number) * factor.to(x.dtype))
        return result


class MoELayer(nn.Module):
    """A router and experts that are spread over the ranks of a buffer.

    Training takes the high-throughput path. :meth:`decode`, without gradients, takes the low-latency
    path; its buffer needs ``low_latency_mode``. The router is the same on all ranks: average its
    gradient over them, as for every replicated weight.
    """

    def __init__(
        self,
        buffer: Buffer,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        dtype: Optional[torch.dtype] = None,
        device: Optional[torch.device] = None,
    ) -> None:
        """``num_experts`` over all ranks of ``buffer``, ``top_k`` of them for each token."""
        super().__init__()
        self.buffer, self.num_experts, self.top_k = buffer, num_experts, top_k
        options: Any = {"dtype": dtype, "device": device}
        self.router = nn.Linear(hidden, num_experts, bias=False, **options)
        self.experts = Experts(num_experts // buffer.group_size, hidden, intermediate, dtype, device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choices ``[T, K]`` int64 and weights ``[T, K]`` float32 that add up to one."""
        scores = self.router(x).float().softmax(dim=-1)
        weights, idx = scores.topk(self.top_k, dim=-1)
        return idx, weights / weights.sum(dim=-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``. Collective."""
        idx, weights = self.route(x)
        recv_x, recv_idx, recv_weights, _, handle = dispatch(
            x, idx, weights, self.buffer, self.num_experts
        )
        return combine(self.experts(recv_x, recv_idx, recv_weights), self.buffer, handle)

    @torch.no_grad()
    def decode(self, x: Tensor, num_max_dispatch_tokens_per_rank: int) -> Tensor:
        """``[T, H]`` bf16 to ``[T, H]`` with at most that many tokens on any rank. Collective."""
        idx, weights = self.route(x)
        recv, count, handle, _, _ = self.buffer.low_latency_dispatch(
            x, idx, num_max_dispatch_tokens_per_rank, self.num_experts, use_fp8=False
        )
        outputs = torch.zeros_like(recv)
        for number, rows in enumerate(count.tolist()):
            outputs[number, :rows] = self.experts.expert(recv[number, :rows], number)
        combined, _, _ = self.buffer.low_latency_combine(outputs, idx, weights, handle)
        return combined

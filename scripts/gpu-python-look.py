"""A first look at the package on a GPU: one call of each kind.

The argument is the number of ranks, which are threads.
"""

import os
import sys

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
import numpy as np
import torch

import deep_ep

R, T, H, E = int(sys.argv[1]), 8, 512, 4


def rank(group: deep_ep.Group) -> str:
    """One rank: rows of ones to experts 0 and E-1, and back."""
    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    with torch.cuda.stream(torch.cuda.Stream()):
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(T, H, R, E)
        buffer = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
        x = torch.from_numpy(np.ones((T, H), "f4")).cuda().bfloat16()
        idx = torch.tensor([[0, E - 1]] * T).cuda()
        weights = torch.tensor([[0.5, 1.5]] * T).cuda()
        torch.cuda.current_stream().synchronize()
        group.barrier()
        ranks, nodes, experts, routes, _ = buffer.get_dispatch_layout(idx, E)
        recv, _, _, counts, handle, _ = buffer.dispatch(
            x, None, ranks, nodes, routes, experts, idx, weights
        )
        back, _, _ = buffer.combine(recv, handle)
        rows, count, route, _, hook = buffer.low_latency_dispatch(
            x, idx, T, E, use_fp8=False, return_recv_hook=True
        )
        hook()
        low, _, _ = buffer.low_latency_combine(rows, idx, weights, route)
        found = back.cpu()[0, 0].item(), low.cpu()[0, 0].item(), count.cpu().tolist()
        assert found[0] == min(R, 2) and found[1] == 2 and sum(counts) == sum(found[2]), found
        return f"rank {group.rank()}: {buffer.runtime.engine}, {recv.shape}, {counts}, {found}"


print("\n".join(deep_ep.run_local(rank, R)))

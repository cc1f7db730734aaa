"""Tuning settings of the high-throughput calls."""

from __future__ import annotations

from dataclasses import dataclass

#: Buffer sizes are multiples of this many bytes.
_ALIGNMENT = 128
#: Bytes that travel with a row besides it, at most: 32 choices with weights, source token, scales of
#: 16,384 channels.
_METADATA = 32 * (8 + 4) + 4 + 128 * 4


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass
class Config:
    """Settings of a high-throughput call.

    Only ``num_sms`` has an effect: it bounds the SMs of a call (on the CPU engine its threads). Chunk
    sizes are accepted because callers pass them; rows move as the engine sees fit.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def _rows(self, tokens: int, hidden_bytes: int, num_ranks: int) -> int:
        channels = max(self.num_sms // 2, 1)
        return _aligned(num_ranks * channels * tokens * (hidden_bytes + _METADATA))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to start with inside a node, for rows of ``hidden_bytes``; any number of ranks.

        A buffer grows when a batch needs more, so this is no limit.
        """
        return self._rows(self.num_max_nvl_chunked_recv_tokens, hidden_bytes, num_ranks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to start with between nodes: 0, as all ranks are on one node."""
        return 0

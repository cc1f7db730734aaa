"""The slow and obvious definition of dispatch and combine, over the inputs of all ranks.

It shares nothing with the library: loops over tokens and choices, in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kit import BF16, FP8


@dataclass
class World:
    """Inputs of all ranks."""

    ranks: int
    experts_per_rank: int
    hidden: int
    top_k: int
    tokens: list[int]
    x: list[np.ndarray] = field(default_factory=list)
    idx: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    @property
    def experts(self) -> int:
        """Experts over all ranks."""
        return self.ranks * self.experts_per_rank

    def host(self, expert: int) -> int:
        """The rank that hosts an expert, -1 for no choice."""
        return -1 if expert < 0 else expert // self.experts_per_rank

    def goes(self, rank: int, token: int) -> list[int]:
        """The ranks that a token goes to, ascending."""
        return sorted({self.host(e) for e in self.idx[rank][token].tolist()} - {-1})

    def arrivals(self, rank: int) -> list[tuple[int, int]]:
        """Source rank and token of each received row."""
        return [
            (source, token)
            for source in range(self.ranks)
            for token in range(self.tokens[source])
            if rank in self.goes(source, token)
        ]

    def local_idx(self, rank: int, source: int, token: int) -> list[int]:
        """Received choices of a token: local experts, -1 for others."""
        first = rank * self.experts_per_rank
        return [e - first if self.host(e) == rank else -1 for e in self.idx[source][token].tolist()]

    def expert_arrivals(
        self, expert: int, masked: frozenset[int] = frozenset()
    ) -> list[tuple[int, int]]:
        """Source rank and token of each row of an expert, once per token."""
        return [
            (source, token)
            for source in range(self.ranks)
            for token in range(self.tokens[source])
            if expert in self.idx[source][token].tolist() and source not in masked
        ]


def make(
    seed: int,
    ranks: int,
    experts_per_rank: int = 2,
    hidden: int = 64,
    top_k: int = 3,
    most_tokens: int = 9,
) -> World:
    """A world with unequal ranks, repeated and absent choices, one rank without tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, most_tokens + 1, ranks).tolist()
    if ranks > 2:
        tokens[int(rng.integers(ranks))] = 0
    world = World(ranks, experts_per_rank, hidden, top_k, tokens)
    fill(world, rng)
    return world


def again(world: World, seed: int) -> World:
    """Other rows and choices of as many tokens."""
    other = World(world.ranks, world.experts_per_rank, world.hidden, world.top_k, world.tokens)
    fill(other, np.random.default_rng(seed))
    return other


def fill(world: World, rng: np.random.Generator) -> None:
    """Random rows, choices and weights."""
    top_k, hidden = world.top_k, world.hidden
    for count in world.tokens:
        world.x.append(rng.standard_normal((count, hidden)).astype(np.float32).astype(BF16))
        world.idx.append(rng.integers(-1, world.experts, (count, top_k)))
        weights = rng.random((count, top_k)).astype(np.float32)
        # What stands where there is no choice must reach no result.
        weights[world.idx[-1] < 0] = np.nan
        world.weights.append(weights)


def weighted(world: World, rank: int) -> np.ndarray:
    """What a low-latency combine of the received rows themselves returns, unrounded."""
    chosen = np.where(world.idx[rank] >= 0, world.weights[rank], 0).astype(np.float64)
    return world.x[rank].astype(np.float64) * chosen.sum(1, keepdims=True)


def combine(world: World, rank: int, outputs: list[np.ndarray], bias: list[np.ndarray]) -> np.ndarray:
    """What combine returns at ``rank``, bit for bit.

    ``outputs[r]`` are rank r's rows in the order of its arrivals.
    """
    places = [{at: row for row, at in enumerate(world.arrivals(r))} for r in range(world.ranks)]
    result = np.zeros((world.tokens[rank], world.hidden), np.float32)
    for token in range(world.tokens[rank]):
        for one in bias:
            result[token] += one[token].astype(np.float32)
        for r in world.goes(rank, token):
            result[token] += outputs[r][places[r][rank, token]].astype(np.float32)
    return result.astype(outputs[0].dtype)


def cast_fp8(x: np.ndarray, powers_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """FP8 codes ``[T, H]`` and float32 scales ``[T, H/128]``."""
    blocks = x.astype(np.float32).reshape(x.shape[0], x.shape[1] // 128, 128)
    amax = np.maximum(np.abs(blocks).max(axis=2), np.float32(1e-4))
    scale = amax * np.float32(1 / 448)
    factor = np.float32(448) / amax
    if powers_of_two:
        exponent = np.ceil(np.log2(scale.astype(np.float64)))
        scale, factor = (2.0**exponent).astype(np.float32), (2.0**-exponent).astype(np.float32)
    codes = np.clip(blocks * factor[:, :, None], -448, 448).astype(FP8)
    return codes.reshape(x.shape), scale

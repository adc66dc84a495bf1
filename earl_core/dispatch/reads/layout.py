"""Layouts: how the ranks of a consuming stage are arranged, and what each needs of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The consumers of a batch.

    data_parallel replicas share the rows out; within a replica `context_parallel` ranks share
    each row's tokens out, and `tensor_parallel` ranks read the same bytes. Rank number:
    `(dp * context_parallel + cp) * tensor_parallel + tp`.

    hosts: the host of each rank; empty means all on the one host of the producers.
    columns: the columns needed; None for all.
    linear, quadratic: a row of n tokens costs `linear * n + quadratic * n**2`; attention makes
    the second part. keep_groups: rows of a group go to one replica. max_imbalance: how far the
    dearest replica may lie above the mean, as a share of it, for the sake of rows that stay where
    they are. pad_to: a row's tokens are padded to a multiple of `pad_to * context_parallel`, and
    every context-parallel rank has an equal, contiguous part of them.

    Raises `ValueError` when the numbers make no layout.
    """

    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    hosts: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    linear: float = 1.0
    quadratic: float = 0.0
    keep_groups: bool = False
    max_imbalance: float = 0.06
    pad_to: int = 1

    def __post_init__(self) -> None:
        for name in ("data_parallel", "context_parallel", "tensor_parallel", "pad_to"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"a layout's {name} is {getattr(self, name)}: it must be 1 or more"
                )
        for name in ("linear", "quadratic", "max_imbalance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a layout's {name} is {value}: it must be finite and 0 or more")
        if self.hosts and len(self.hosts) != self.ranks:
            raise ValueError(
                f"a layout of {self.ranks} ranks names {len(self.hosts)} hosts: name the host of "
                "every rank, or none"
            )

    @property
    def ranks(self) -> int:
        """Number of consumer ranks."""
        return self.data_parallel * self.context_parallel * self.tensor_parallel

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(data, context, tensor) parallel coordinates of a rank. Raises `IndexError`."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is not in a layout of {self.ranks} ranks")
        replica, tensor = divmod(rank, self.tensor_parallel)
        data, context = divmod(replica, self.context_parallel)
        return data, context, tensor

    def cost(self, tokens: np.ndarray) -> np.ndarray:
        """Predicted cost of rows of `tokens` tokens, float64; 1 each where all would be free."""
        counts = tokens.astype(np.float64)
        cost = self.linear * counts + self.quadratic * counts**2
        return cost if cost.any() else np.ones(len(tokens))

    def token_ranges(
        self, tokens: np.ndarray, context: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What context-parallel rank `context` reads of rows of `tokens` tokens.

        Returns int64 arrays (start, stop, padding): the real tokens `start:stop`, and how many
        padding tokens follow them; `stop - start + padding` is equal on all context ranks.
        """
        multiple = self.pad_to * self.context_parallel
        part = -(-tokens // multiple) * self.pad_to
        start = np.minimum(part * context, tokens)
        stop = np.minimum(start + part, tokens)
        return start, stop, part - (stop - start)

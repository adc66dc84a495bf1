"""Layouts: how the ranks of a consuming stage are arranged, and what rows cost them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The consumers of a batch.

    data_parallel replicas share the rows out; the `ranks_per_replica` of a replica (context x
    tensor parallel) read the same rows, whole. Rank number: `replica * ranks_per_replica + k`.

    hosts: the host of each rank; empty means all on the one host of the producers.
    columns: the columns needed; None for all.
    linear, quadratic: a row of n tokens costs `linear * n + quadratic * n**2`; attention makes
    the second part. keep_groups: rows of a group go to one replica. max_imbalance: how far the
    dearest replica may lie above the mean, as a share of it, for the sake of rows that stay where
    they are.

    Raises `ValueError` when the numbers make no layout.
    """

    data_parallel: int = 1
    ranks_per_replica: int = 1
    hosts: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    linear: float = 1.0
    quadratic: float = 0.0
    keep_groups: bool = False
    max_imbalance: float = 0.06

    def __post_init__(self) -> None:
        for name in ("data_parallel", "ranks_per_replica"):
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
        return self.data_parallel * self.ranks_per_replica

    def replica(self, rank: int) -> int:
        """The replica that a rank belongs to. Raises `IndexError`."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is not in a layout of {self.ranks} ranks")
        return rank // self.ranks_per_replica

    def cost(self, tokens: np.ndarray) -> np.ndarray:
        """Predicted cost of rows of `tokens` tokens, float64; 1 each where all would be free."""
        counts = tokens.astype(np.float64)
        cost = self.linear * counts + self.quadratic * counts**2
        return cost if cost.any() else np.ones(len(tokens))

"""Uses of a device's memory, and what decides those of training stages."""

from __future__ import annotations

from operator import add
from typing import NamedTuple


class Memory(NamedTuple):
    """The uses of a device's memory, bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    runtime: float = 0.0
    kv_cache: float = 0.0
    states: float = 0.0

    @property
    def total(self) -> float:
        """Everything together."""
        return sum(self)

    def plus(self, other: Memory) -> Memory:
        """Both, use by use."""
        return Memory(*map(add, self, other))


class TrainingNeeds(NamedTuple):
    """Properties of the algorithm that decide the memory of training stages.

    mixed: bf16 copies compute, of float32 weights; else all is float32. compiled: the layers are.
    answered: share of the tokens that the policy wrote, the only ones with logits.
    """

    mixed: bool = True
    compiled: bool = False
    answered: float = 1.0

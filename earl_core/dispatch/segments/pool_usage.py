"""The content of a pool: published weights, which have a room of their own, and all else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

WEIGHTS = r"weights-\d{8,18}\.safetensors"
"""Names of published weights."""

_PADDING = 64
"""Bytes by which two versions of the weights may differ: the digits of their numbers."""


class Held(NamedTuple):
    """Bytes in a pool. version: of the largest published weights, 0 without any. weights: of them
    all, and of segments as large, which were or become such. others: of everything else."""

    version: int
    weights: int
    others: int

    @classmethod
    def of(cls, files: Sequence[tuple[str, int]]) -> Held:
        """files: names and sizes."""
        version = max((size for name, size in files if re.fullmatch(WEIGHTS, name)), default=0)
        alike = cls(version, 0, 0).is_weights
        weights = sum(size for _, size in files if alike(size))
        return cls(version, weights, sum(size for _, size in files) - weights)

    def is_weights(self, size: int) -> bool:
        """True when a file of this size counts as weights."""
        return self.version > 0 and abs(size - self.version) <= _PADDING

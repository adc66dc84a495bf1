"""Placements of somebody's own, as a run file names them."""

from __future__ import annotations

import os
from collections.abc import Sequence


class Apart:
    """As `separate`, but training has the first devices. What it says of threads depends on the
    version of this code, which the tests' variable stands for."""

    def devices(
        self, count: int, rollout: int | None, update: int | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        training = count // 2 if update is None else update
        if update is None and rollout is not None:
            training = count - rollout
        numbers = range(count)
        return numbers[training:][:rollout], numbers[:training]

    def threads(self, cores: int, rollout: int, update: int) -> tuple[int, int]:
        return int(os.environ.get("EARL_TEST_THREADS", "1")), 1

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


APART = Apart()

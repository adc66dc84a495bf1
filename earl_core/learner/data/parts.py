"""What a loss counts as one sequence: an episode or, where conversations have roles, a role's part
of it, as advantages do."""

from __future__ import annotations

import numpy as np
import xxhash

from earl_core.dispatch import Batch

ROLE = "role"
"""Column of the role of a sample's conversation; older shards have none."""

_NAMED = 1 << 62
"""Numbers of named roles' parts have this bit, which no episode's has."""


def part_ids(batch: Batch) -> np.ndarray:
    """Number the part that each row belongs to, int64: the episode's number where its role has no
    name. Hashed, so that ranks that read different rows of an episode agree."""
    ids = batch.scalars("episode_id").astype(np.int64)
    if ROLE in batch.names():
        for row, role in enumerate(batch.strings(ROLE)):
            if role:
                digest = xxhash.xxh3_64_intdigest(f"part|{ids[row]}|{role}".encode())
                ids[row] = _NAMED | digest & (_NAMED - 1)
    return ids

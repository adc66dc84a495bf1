"""What ranks with different samples tell each other: small arrays of numbers, never pickles.

All of it lies in the host's memory and travels between hosts' processes; no device waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from earl_core.learner.mesh import UpdateMesh


class DataRanks:
    """The data-parallel ranks that this one belongs to, itself included.

    All methods are collective. With one rank they give its own values back.
    """

    def __init__(self, mesh: UpdateMesh) -> None:
        self._group = mesh.group("data")
        self.rank = mesh.data_rank
        self.size = mesh.shape.data

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays [n_r, ...] of all ranks, in their order; equal dtypes and other dimensions."""
        if self._group is None:
            return [array]
        lengths = self._equal(np.array([len(array)], dtype=np.int64))
        most = int(max(int(length[0]) for length in lengths))
        padded = np.zeros((most, *array.shape[1:]), dtype=array.dtype)
        padded[: len(array)] = array
        parts = self._equal(padded)
        return [part[: int(n[0])] for part, n in zip(parts, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """The values of all ranks, which must be JSON."""
        if self._group is None:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return [json.loads(part.tobytes()) for part in self.gather(text)]

    def most(self, counts: Sequence[int]) -> list[int]:
        """The largest count over the ranks at each place; equally many on all."""
        if self._group is None:
            return list(counts)
        return np.max(self._equal(np.array(counts, dtype=np.int64)), axis=0).tolist()

    def _equal(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays of all ranks, of one shape."""
        own = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self._group)
        return [part.numpy().view(array.dtype).reshape(array.shape) for part in parts]

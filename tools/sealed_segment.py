"""Bytes that lie as those of a run's shards do: sealed in shared memory, mapped read-only."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool import SegmentPool

LOCATIONS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Places where such bytes may lie, the best first."""


class Shard:
    """A sealed segment of `size` bytes, mapped read-only as readers have it."""

    def __init__(self, pool: SegmentPool, size: int) -> None:
        segment = pool.acquire(size)
        numbers = np.random.default_rng(0).integers(0, 2**31, size // 8, dtype=np.int64)
        np.frombuffer(segment.memory, dtype=np.int64, count=size // 8)[:] = numbers
        whole = segment.size
        self._pool, self._path = (
            pool,
            segment.seal(f"000000-benchmark-0-{segment.generation}.arrow"),
        )
        self._mapped = map_shared(self._path, whole)
        self.array: np.ndarray | None = np.frombuffer(self._mapped.memory, np.uint8, count=size)

    @property
    def tensor(self) -> torch.Tensor:
        assert self.array is not None
        return torch.from_numpy(self.array)

    def close(self) -> None:
        self.array = None
        self._mapped.close()
        self._pool.release(self._path)

    def page_lock(self) -> float:
        """The seconds it took, once in a process. Raises RuntimeError where CUDA cannot."""
        began = time.perf_counter()
        if not self._mapped.page_lock():
            raise RuntimeError(
                "page-locking a read-only mapping failed: this driver or device cannot register "
                "read-only memory"
            )
        return time.perf_counter() - began

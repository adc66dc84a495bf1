"""Segments for tests, and child processes that have some."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from earl_core.dispatch.segments import leases
from earl_core.dispatch.segments.pool import SegmentPool

MIB = 1024 * 1024
FORK = multiprocessing.get_context("fork")
SHARED = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def free_bytes(pool: SegmentPool) -> int:
    """Bytes of the free segments."""
    return sum(path.stat().st_size for path in pool.directory.glob(".free.*"))


def drop_idle_mappings() -> None:
    """Unmap every cached file that is not leased, as where descriptors run out."""
    with leases._cache._held():
        leases._cache._drop_idle(0)


class Child:
    """A forked process that runs `work(pipe)`; killed at the end of the test."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(30), "the child said nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.join()
        self.pipe.close()


def sealed(pool: SegmentPool, size: int, fill: int = 1, name: str = "shard") -> tuple[Path, int]:
    with pool.acquire(size) as segment:
        np.frombuffer(segment.memory, dtype=np.uint8)[:] = fill
        return segment.seal(f"000000-{name}-0-{segment.generation}.arrow"), segment.size


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def inode(path: Path) -> int:
    return path.stat().st_ino


def make_free_segments(pipe: Connection, directory: Path, size: int, count: int) -> None:
    """Work of a child: has free segments that it maps; says their inodes."""
    pool = SegmentPool(directory, 64 * MIB)
    segments = [pool.acquire(size) for _ in range(count)]
    pipe.send([inode(segment.path) for segment in segments])
    for segment in segments:
        segment.abandon()
    pipe.send("released")
    pipe.recv()


def write_for_ever(pipe: Connection, directory: Path, size: int) -> None:
    """Work of a child: holds a segment that it never seals."""
    segment = SegmentPool(directory, 64 * MIB).acquire(size)
    segment.memory[: segment.size // 2] = b"x" * (segment.size // 2)
    pipe.send(inode(segment.path))
    pipe.recv()

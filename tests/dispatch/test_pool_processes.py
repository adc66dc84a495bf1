"""The pool between processes and threads: crashes, forks, races, leaks."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import size_class
from earl_core.dispatch.segments.segment import Segment
from tests.dispatch.segments import (
    MIB,
    Child,
    free_bytes,
    inode,
    sealed,
    visible,
    write_for_ever,
)

# Crashes


def test_a_killed_writer_leaves_a_segment_that_is_swept_and_recycled(pool: SegmentPool) -> None:
    with Child(write_for_ever, pool.directory, MIB) as child:
        theirs = child.hear()
        assert pool.sweep_unsealed() == 0, "its writer lives"
        child.kill()
    assert visible(pool.directory) == []
    assert pool.sweep_unsealed() == 1
    assert free_bytes(pool) == pool.used_bytes() == MIB
    with pool.acquire(MIB) as segment:
        assert inode(segment.path) == theirs


def test_a_segment_with_holes_is_removed_not_recycled(pool: SegmentPool) -> None:
    with Child(write_for_ever, pool.directory, MIB) as child:
        child.hear()
        child.kill()
    (left,) = pool.directory.glob(".writing.*")
    os.truncate(left, 0)
    os.truncate(left, MIB)
    assert pool.sweep_unsealed() == 1
    assert pool.used_bytes() == 0


def _allocate_large(pipe: Connection, directory: Path) -> None:
    pool = SegmentPool(directory, 4096 * MIB)
    pipe.send("ready")
    while True:
        pool.acquire(48 * MIB).abandon()
        pool.trim()


def test_a_writer_killed_while_its_pages_are_allocated(directory: Path) -> None:
    pool = SegmentPool(directory, 4096 * MIB)
    draw = random.Random(1)
    for _ in range(12):
        with Child(_allocate_large, directory) as child:
            child.hear()
            time.sleep(draw.uniform(0.0, 0.05))
            child.kill()
        pool.sweep_unsealed()
        assert pool.used_bytes() == free_bytes(pool)
        for path in directory.glob(".free.*"):
            assert path.stat().st_blocks * 512 >= path.stat().st_size
    pool.trim()
    assert pool.used_bytes() == 0


def _live(pipe: Connection, directory: Path, seed: int) -> None:
    """Write, read and release at random until killed; ends when something is wrong."""
    pool = SegmentPool(directory, 12 * MIB, wait_seconds=60)
    draw = random.Random(seed)
    pipe.send("ready")
    while True:
        with pool.acquire(draw.choice([20_000, 200_000, MIB])) as segment:
            value = segment.generation % 251
            np.frombuffer(segment.memory, dtype=np.uint8)[:] = value
            if draw.random() < 0.1:
                continue
            path = segment.seal(f"{os.getpid():06d}-{value}-0-{segment.generation}.arrow")
        with suppress(FileNotFoundError), closing(map_shared(path, segment.size)) as mapped:
            if (np.frombuffer(mapped.memory, dtype=np.uint8) != value).any():
                raise AssertionError(f"{path} was overwritten")
        for other in visible(directory)[:3]:
            if draw.random() < 0.5:
                pool.release(directory / other)


def test_random_kills_leave_a_pool_that_empties(directory: Path) -> None:
    pool = SegmentPool(directory, 12 * MIB)
    draw = random.Random(2)
    children = [Child(_live, directory, seed) for seed in range(3)]
    try:
        for child in children:
            assert child.hear() == "ready"
        for turn in range(16):
            time.sleep(draw.uniform(0.0, 0.03))
            place = draw.randrange(3)
            children[place].kill()
            assert children[place].process.exitcode == -signal.SIGKILL, "it had failed before"
            children[place] = Child(_live, directory, 100 + turn)
            assert children[place].hear() == "ready"
            assert pool.used_bytes() <= pool.max_bytes
    finally:
        for child in children:
            child.kill()
    for name in visible(directory):
        assert pool.release(directory / name), "the leases of the dead are gone"
    pool.sweep_unsealed()
    assert pool.used_bytes() == free_bytes(pool)
    pool.trim()
    assert pool.used_bytes() == 0


# Forks, spawned children, threads, descriptors


def _misuse(pipe: Connection, segment: Segment, directory: Path) -> None:
    try:
        segment.seal("000001-stolen-0-1.arrow")
    except ValueError as error:
        pipe.send(str(error))
    segment.abandon()
    path, _ = sealed(SegmentPool(directory, 64 * MIB), 1, fill=9, name="child")
    pipe.send(path)


def test_a_forked_child_cannot_seal_or_abandon_the_parents_segment(pool: SegmentPool) -> None:
    with pool.acquire(1) as segment:
        with Child(_misuse, segment, pool.directory) as child:
            assert f"belongs to process {os.getpid()}" in child.hear()
            path = child.hear()
            child.process.join()
        assert path.read_bytes()[0] == 9
        assert inode(path) != inode(segment.path)
        assert pool.sweep_unsealed() == 0
        assert segment.seal("000001-own-0-1.arrow").exists()


def _spawned(directory: Path, path: Path, size: int) -> None:
    pool = SegmentPool(directory, 64 * MIB)
    with closing(map_shared(path, size)) as mapped:
        assert mapped.memory[0] == 4
        assert not pool.release(path)
    sealed(pool, size, fill=6, name="spawned")


def test_a_spawned_child_shares_the_pool(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=4)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_spawned, args=(pool.directory, path, size))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert len(visible(pool.directory)) == 2


def test_threads_never_share_a_segment(pool: SegmentPool) -> None:
    wrong: list[str] = []

    def work(value: int) -> None:
        for _ in range(150):
            path, size = sealed(pool, 20_000, fill=value, name=f"thread-{value}")
            with closing(map_shared(path, size)) as mapped:
                if set(bytes(mapped.memory)) != {value}:
                    wrong.append(str(path))
            pool.release(path)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for name in visible(pool.directory):
        assert pool.release(pool.directory / name)
    assert pool.used_bytes() == free_bytes(pool) <= 6 * size_class(20_000)


def test_thousands_of_cycles_leak_neither_descriptors_nor_segments(pool: SegmentPool) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool.release(sealed(pool, 1)[0])
    before = descriptors()
    for turn in range(3000):
        with pool.acquire(1 if turn % 2 else 30_000) as segment:
            if turn % 3:
                assert pool.release(segment.seal(f"000001-s-0-{segment.generation}.arrow"))
    # One more segment size stays mapped than before.
    assert descriptors() <= before + 1
    assert pool.used_bytes() == size_class(1) + size_class(30_000)


def test_mapping_many_segments_for_writing_is_bounded(pool: SegmentPool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [pool.acquire(1) for _ in range(200)]
    for segment in held:
        segment.abandon()
    assert len(os.listdir("/proc/self/fd")) <= before + 64

"""The pool's limit and a full file system: what makes room, what waits, what fails."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from earl_core.dispatch.segments.leases import map_shared, process_name
from earl_core.dispatch.segments.pool import PoolFull, SegmentPool
from tests.dispatch.segments import (
    MIB,
    Child,
    free_bytes,
    inode,
    sealed,
    write_for_ever,
)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "earl-test", str(tmp_path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    yield tmp_path / "run"
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_free_segments_of_other_classes_make_room(pool: SegmentPool) -> None:
    pool.max_bytes = 4 * MIB
    for size in (MIB, 2 * MIB):
        pool.release(sealed(pool, size)[0])
    with pool.acquire(512 * 1024):
        assert free_bytes(pool) == 3 * MIB, "there was room: nothing had to go"
        with pool.acquire(3 * MIB):
            assert free_bytes(pool) == 0
            assert pool.used_bytes() == 3 * MIB + 512 * 1024


def test_a_larger_free_segment_is_used_before_others_are_removed(pool: SegmentPool) -> None:
    pool.max_bytes = 2 * MIB
    pool.release(sealed(pool, 2 * MIB)[0])
    with pool.acquire(MIB + 1) as segment:
        assert segment.size == 2 * MIB


def test_room_for_an_ordinary_file(pool: SegmentPool) -> None:
    pool.max_bytes = 4 * MIB
    pool.release(sealed(pool, 3 * MIB)[0])
    pool.reserve(MIB)
    assert free_bytes(pool) == 3 * MIB
    pool.reserve(2 * MIB)
    assert free_bytes(pool) == 0
    with pool.acquire(3 * MIB), pytest.raises(PoolFull, match="max_bytes"):
        pool.reserve(2 * MIB)


def test_more_than_the_limit_fails_at_once(pool: SegmentPool) -> None:
    pool.wait_seconds = 3600
    with pytest.raises(PoolFull, match="max_bytes is 67,108,864") as caught:
        pool.acquire(65 * MIB)
    assert caught.value.errno == errno.ENOSPC


def _grab(pipe: Connection, directory: Path, limit: int) -> None:
    pool = SegmentPool(directory, limit)
    held = []
    try:
        while True:
            held.append(pool.acquire(MIB))
            assert pool.used_bytes() <= limit
    except PoolFull:
        pipe.send(len(held))
    pipe.recv()


def test_the_limit_holds_across_processes(pool: SegmentPool) -> None:
    limit = 9 * MIB + 1
    with Child(_grab, pool.directory, limit) as one, Child(_grab, pool.directory, limit) as two:
        assert one.hear() + two.hear() == 9
        assert pool.used_bytes() == 9 * MIB


def _move(pipe: Connection, directory: Path, stage: str) -> None:
    # Two writers never share stage and rank: a coarse clock gives both the same generation.
    pool = SegmentPool(directory, 64 * MIB)
    pipe.send("ready")
    while not pipe.poll():
        pool.release(sealed(pool, MIB, name=stage)[0])


def test_bytes_are_counted_while_segments_change_state(pool: SegmentPool) -> None:
    for segment in [pool.acquire(MIB) for _ in range(4)]:
        segment.abandon()
    with (
        Child(_move, pool.directory, "rollout") as one,
        Child(_move, pool.directory, "reward") as two,
    ):
        assert one.hear() == two.hear() == "ready"
        counted = {pool.used_bytes() for _ in range(2000)}
    assert counted == {4 * MIB}


def _hold_then_release(pipe: Connection, directory: Path) -> None:
    pool = SegmentPool(directory, 2 * MIB)
    path, _ = sealed(pool, 2 * MIB)
    pipe.send(inode(path))
    pipe.recv()
    time.sleep(0.2)
    assert pool.release(path)
    pipe.recv()


def test_a_full_pool_waits_until_another_process_releases(pool: SegmentPool) -> None:
    pool.max_bytes = 2 * MIB
    with Child(_hold_then_release, pool.directory) as child:
        theirs = child.hear()
        with pytest.raises(PoolFull):
            pool.acquire(2 * MIB)
        pool.wait_seconds = 30
        child.pipe.send("go")
        with pool.acquire(2 * MIB) as segment:
            assert inode(segment.path) == theirs


def test_a_full_pool_takes_back_what_a_dead_writer_held(pool: SegmentPool) -> None:
    pool.max_bytes = 2 * MIB
    with Child(write_for_ever, pool.directory, 2 * MIB) as child:
        theirs = child.hear()
        with pytest.raises(PoolFull):
            pool.acquire(2 * MIB)
        child.kill()
        with pool.acquire(2 * MIB) as segment:
            assert inode(segment.path) == theirs


def _lease(pipe: Connection, path: Path, size: int) -> None:
    mapped = map_shared(path, size)
    pipe.send(mapped.memory[0])
    pipe.recv()
    mapped.close()
    pipe.send("given back")
    pipe.recv()


def test_the_error_names_files_and_the_processes_with_leases(pool: SegmentPool) -> None:
    pool.max_bytes = 2 * MIB
    path, size = sealed(pool, MIB)
    for _ in range(6):
        sealed(pool, 128 * 1024)
    small, small_size = sealed(pool, 1)
    with Child(_lease, path, size) as child, Child(_lease, small, small_size) as other:
        child.hear(), other.hear()
        with pytest.raises(PoolFull) as caught:
            pool.acquire(MIB)
        name = process_name(child.process.pid)
        locks_are_listed = "FLOCK" in Path("/proc/locks").read_text()
    text = str(caught.value)
    assert path.name in text
    assert "1,048,576 bytes do not fit" in text
    if locks_are_listed:  # not in every container
        leases = text.partition("Leases: ")[2]
        assert f"{child.process.pid} {name!r}" in leases
        assert f"keeps 1 file, 1,048,576: {path.name}" in leases
        assert leases.index(f"{child.process.pid} '") < leases.index(f"{other.process.pid} '")
        assert f"keeps 1 file, {small_size:,}: {small.name}" in leases


# A full file system


def test_a_full_file_system_is_an_error_not_a_signal(small_tmpfs: Path) -> None:
    pool = SegmentPool(small_tmpfs, 64 * MIB)
    held = []

    def fill_up() -> None:
        while True:
            segment = pool.acquire(300_000)
            np.frombuffer(segment.memory, dtype=np.uint8)[:] = 7
            held.append(segment)

    with pytest.raises(PoolFull, match="file system") as caught:
        fill_up()
    assert caught.value.errno == errno.ENOSPC
    assert len(held) == 6
    assert pool.used_bytes() == sum(segment.size for segment in held), "nothing half-made stays"
    for segment in held:
        segment.abandon()
    with pool.acquire(MIB) as segment:
        np.frombuffer(segment.memory, dtype=np.uint8)[:] = 7


def test_others_filling_the_file_system_meanwhile(small_tmpfs: Path) -> None:
    pool = SegmentPool(small_tmpfs, 64 * MIB)
    pool.reserve(1)
    (small_tmpfs.parent / "other").write_bytes(bytes(MIB + MIB // 2))
    with pytest.raises(PoolFull):
        pool.acquire(MIB)
    with pool.acquire(256 * 1024) as segment:
        np.frombuffer(segment.memory, dtype=np.uint8)[:] = 7

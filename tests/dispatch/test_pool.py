"""The segment pool: recycling, limits, crashes, races."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.dispatch.leases import ShardGone, map_shared
from earl_core.dispatch.pool import PoolFull, Segment, SegmentPool
from earl_core.dispatch.size_classes import SMALLEST, is_size_class, size_class

MIB = 1024 * 1024
FORK = multiprocessing.get_context("fork")
SHARED = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="earl-pool-", dir=SHARED) as root:
        yield Path(root) / "run"


@pytest.fixture
def pool(directory: Path) -> SegmentPool:
    return SegmentPool(directory, 64 * MIB)


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
        return segment.seal(f"{name}-{segment.generation}.arrow"), segment.size


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def inode(path: Path) -> int:
    return path.stat().st_ino


# Size classes


@given(st.integers(0, 1 << 40))
def test_classes_are_whole_pages_and_waste_at_most_a_quarter(size: int) -> None:
    chosen = size_class(size)
    assert chosen >= size
    assert chosen % mmap.PAGESIZE == 0
    assert is_size_class(chosen)
    assert size_class(chosen) == chosen
    assert chosen == SMALLEST or chosen <= 1.25 * size
    assert (
        chosen == SMALLEST
        or not is_size_class(chosen - mmap.PAGESIZE)
        or (size_class(chosen - mmap.PAGESIZE) < size)
    )


def test_there_are_four_classes_in_an_octave() -> None:
    found = {size_class(size) for size in range(MIB, 2 * MIB, 4096)}
    assert sorted(found) == [MIB, MIB * 5 // 4, MIB * 3 // 2, MIB * 7 // 4, 2 * MIB]


def test_a_negative_size_is_refused(pool: SegmentPool) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.acquire(-1)


# States


def test_a_segment_is_recycled_with_its_pages_and_its_mapping(pool: SegmentPool) -> None:
    with pool.acquire(100_000) as segment:
        first_generation = segment.generation
        segment.memory[:3] = b"abc"
        path = segment.seal("a-1.arrow")
    number, blocks = inode(path), path.stat().st_blocks
    assert path.read_bytes()[:3] == b"abc"
    assert visible(pool.directory) == ["a-1.arrow"]

    assert pool.release(path)
    assert visible(pool.directory) == []
    assert pool.free_bytes() == pool.used_bytes() == size_class(100_000)

    with pool.acquire(size_class(100_000)) as again:
        assert inode(again.path) == number
        assert again.path.stat().st_blocks == blocks
        assert again.generation > first_generation
        assert bytes(again.memory[:3]) == b"abc", "recycled memory is stale, not zero"
        assert pool.free_bytes() == 0


def test_pages_are_allocated_before_anything_is_written(pool: SegmentPool) -> None:
    with pool.acquire(MIB) as segment:
        assert segment.path.stat().st_blocks * 512 >= segment.size


def test_an_abandoned_segment_is_free_again(pool: SegmentPool) -> None:
    with pool.acquire(1) as segment:
        number = inode(segment.path)
    with pytest.raises(ValueError, match="abandoned"):
        segment.seal("late")
    with pytest.raises(ValueError, match="abandoned"):
        _ = segment.memory
    segment.abandon()
    assert pool.acquire(1).path.stat().st_ino == number


def test_an_error_while_filling_leaves_nothing_visible(pool: SegmentPool) -> None:
    with pytest.raises(RuntimeError), pool.acquire(1):
        raise RuntimeError
    assert visible(pool.directory) == []
    assert pool.free_bytes() == pool.used_bytes()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up"])
def test_a_seal_never_leaves_the_directory_or_hides(pool: SegmentPool, name: str) -> None:
    with pool.acquire(1) as segment, pytest.raises(ValueError, match="visible name"):
        segment.seal(name)


def test_a_published_name_is_never_replaced(pool: SegmentPool) -> None:
    with pool.acquire(1) as first, pool.acquire(1) as second:
        first.memory[:1] = b"1"
        path = first.seal("same")
        with pytest.raises(FileExistsError, match="generation"):
            second.seal("same")
    assert path.read_bytes()[:1] == b"1"


def test_sealing_after_the_directory_was_removed_says_so(pool: SegmentPool) -> None:
    with pool.acquire(1) as segment:
        pool.remove()
        with pytest.raises(FileNotFoundError, match="swept under a live process"):
            segment.seal("late")


def test_releasing_twice_or_something_else(pool: SegmentPool) -> None:
    path, _ = sealed(pool, 1)
    assert pool.release(path)
    assert pool.release(path)
    for wrong in (pool.directory.parent / "x", pool.directory / ".free.1.1"):
        with pytest.raises(ValueError, match="not a sealed file"):
            pool.release(wrong)


def test_ordinary_files_count_and_are_removed_not_recycled(pool: SegmentPool) -> None:
    path, size = sealed(pool, MIB)
    weights = pool.directory / "weights-3.safetensors"
    weights.write_bytes(bytes(MIB))
    assert pool.used_bytes() == size + MIB
    with weights.open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    assert pool.release(weights)
    assert not weights.exists()
    assert pool.free_bytes() == 0
    assert mapped[5] == 0
    mapped.close()
    assert pool.release(path)


# Affinity


def _make_free(pipe: Connection, directory: Path, size: int, count: int) -> None:
    pool = SegmentPool(directory, 64 * MIB)
    segments = [pool.acquire(size) for _ in range(count)]
    pipe.send([inode(segment.path) for segment in segments])
    for segment in segments:
        segment.abandon()
    pipe.send("released")
    pipe.recv()


def test_own_mappings_first_then_those_of_others(pool: SegmentPool) -> None:
    own = pool.acquire(MIB)
    mine = inode(own.path)
    with Child(_make_free, pool.directory, MIB, 3) as child:
        theirs = set(child.hear())
        child.hear()
        own.abandon()
        taken = [pool.acquire(MIB) for _ in range(4)]
        assert inode(taken[0].path) == mine
        assert {inode(segment.path) for segment in taken[1:]} == theirs
    assert pool.used_bytes() == 4 * MIB
    for segment in taken:
        segment.abandon()


# The limit


def test_free_segments_of_other_classes_make_room(pool: SegmentPool) -> None:
    pool.max_bytes = 4 * MIB
    for size in (MIB, 2 * MIB):
        pool.release(sealed(pool, size)[0])
    with pool.acquire(512 * 1024):
        assert pool.free_bytes() == 3 * MIB, "there was room: nothing had to go"
        with pool.acquire(3 * MIB):
            assert pool.free_bytes() == 0
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
    assert pool.free_bytes() == 3 * MIB
    pool.reserve(2 * MIB)
    assert pool.free_bytes() == 0
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


def _move(pipe: Connection, directory: Path) -> None:
    pool = SegmentPool(directory, 64 * MIB)
    pipe.send("ready")
    while not pipe.poll():
        pool.release(sealed(pool, MIB)[0])


def test_bytes_are_counted_while_segments_change_state(pool: SegmentPool) -> None:
    for segment in [pool.acquire(MIB) for _ in range(4)]:
        segment.abandon()
    with Child(_move, pool.directory) as one, Child(_move, pool.directory) as two:
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


def _write_for_ever(pipe: Connection, directory: Path, size: int) -> None:
    segment = SegmentPool(directory, 64 * MIB).acquire(size)
    segment.memory[: segment.size // 2] = b"x" * (segment.size // 2)
    pipe.send(inode(segment.path))
    pipe.recv()


def test_a_full_pool_takes_back_what_a_dead_writer_held(pool: SegmentPool) -> None:
    pool.max_bytes = 2 * MIB
    with Child(_write_for_ever, pool.directory, 2 * MIB) as child:
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
    path, size = sealed(pool, 2 * MIB)
    with Child(_lease, path, size) as child:
        child.hear()
        with pytest.raises(PoolFull) as caught:
            pool.acquire(MIB)
        locks_are_listed = "FLOCK" in Path("/proc/locks").read_text()
    text = str(caught.value)
    assert path.name in text
    assert "2,097,152" in text
    assert "1,048,576 bytes do not fit" in text
    if locks_are_listed:  # not in every container
        assert f"leased by {child.process.pid} '" in text
        assert "python" in text


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


# Crashes


def test_a_killed_writer_leaves_a_segment_that_is_swept_and_recycled(pool: SegmentPool) -> None:
    with Child(_write_for_ever, pool.directory, MIB) as child:
        theirs = child.hear()
        assert pool.sweep_unsealed() == 0, "its writer lives"
        child.kill()
    assert visible(pool.directory) == []
    assert pool.sweep_unsealed() == 1
    assert pool.free_bytes() == pool.used_bytes() == MIB
    with pool.acquire(MIB) as segment:
        assert inode(segment.path) == theirs


def test_a_segment_with_holes_is_removed_not_recycled(pool: SegmentPool) -> None:
    with Child(_write_for_ever, pool.directory, MIB) as child:
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
        assert pool.used_bytes() == pool.free_bytes()
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
            path = segment.seal(f"{os.getpid()}-{segment.generation}-{value}.arrow")
        with suppress(ShardGone), map_shared(path, segment.size) as mapped:
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
        for turn in range(40):
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
    assert pool.used_bytes() == pool.free_bytes()
    pool.trim()
    assert pool.used_bytes() == 0


# Removal


def test_removing_free_segments_gives_memory_back_though_idle_processes_map_them(
    pool: SegmentPool,
) -> None:
    with Child(_make_free, pool.directory, MIB, 2) as child:
        child.hear()
        child.hear()
        descriptors = [os.open(path, os.O_RDONLY) for path in pool.directory.glob(".free.*")]
        assert len(descriptors) == 2
        assert pool.trim(keep_bytes=MIB) == MIB
        assert pool.trim() == MIB
        for descriptor in descriptors:
            assert os.fstat(descriptor).st_nlink == 0
            assert os.fstat(descriptor).st_blocks == 0
            os.close(descriptor)


def test_removing_a_run_leaves_readers_whole(pool: SegmentPool) -> None:
    leased, size = sealed(pool, MIB, fill=5)
    sealed(pool, MIB)
    pool.release(sealed(pool, 2 * MIB)[0])
    (pool.directory / "owner.json").write_text("{}")
    with map_shared(leased, size) as mapped:
        pool.remove()
        assert not pool.directory.exists()
        assert set(bytes(mapped.memory)) == {5}
    assert pool.used_bytes() == 0


# Poison


@pytest.mark.parametrize("by_environment", [False, True])
def test_released_memory_is_poisoned(
    directory: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    if by_environment:
        monkeypatch.setenv("EARL_POISON", "1")
    pool = SegmentPool(directory, 64 * MIB, poison=not by_environment)
    path, _ = sealed(pool, 1, fill=3)
    with path.open("rb") as reader:
        unprotected = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    assert unprotected[100] == 3
    assert pool.release(path)
    assert set(unprotected[:]) == {0xA5}
    with pool.acquire(1) as segment:
        segment.memory[:] = bytes(segment.size)
    assert set(unprotected[:]) == {0xA5}, "abandoned segments too"
    unprotected.close()


# Fork, spawn, threads, descriptors


def _misuse(pipe: Connection, segment: Segment, directory: Path) -> None:
    try:
        segment.seal("stolen")
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
        assert segment.seal("own").exists()


def _spawned(directory: Path, path: Path, size: int) -> None:
    pool = SegmentPool(directory, 64 * MIB)
    with map_shared(path, size) as mapped:
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
            with map_shared(path, size) as mapped:
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
    assert pool.used_bytes() == pool.free_bytes() <= 6 * size_class(20_000)


def test_thousands_of_cycles_leak_neither_descriptors_nor_segments(pool: SegmentPool) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    pool.release(sealed(pool, 1)[0])
    before = descriptors()
    for turn in range(3000):
        with pool.acquire(1 if turn % 2 else 30_000) as segment:
            if turn % 3:
                assert pool.release(segment.seal(f"s-{segment.generation}"))
    # One more segment size stays mapped than before.
    assert descriptors() <= before + 1
    assert pool.used_bytes() == size_class(1) + size_class(30_000)


def test_mapping_many_segments_for_writing_is_bounded(pool: SegmentPool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [pool.acquire(1) for _ in range(200)]
    for segment in held:
        segment.abandon()
    assert len(os.listdir("/proc/self/fd")) <= before + 64

"""The segment pool: states, recycling, removal, poison."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import size_class
from tests.dispatch.segments import (
    MIB,
    Child,
    free_bytes,
    inode,
    make_free_segments,
    sealed,
    visible,
)

# States


def test_a_negative_size_is_refused(pool: SegmentPool) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.acquire(-1)


def test_a_segment_is_recycled_with_its_pages_and_its_mapping(pool: SegmentPool) -> None:
    with pool.acquire(100_000) as segment:
        first_generation = segment.generation
        segment.memory[:3] = b"abc"
        path = segment.seal("000001-a-0-1.arrow")
    number, blocks = inode(path), path.stat().st_blocks
    assert path.read_bytes()[:3] == b"abc"
    assert visible(pool.directory) == ["000001-a-0-1.arrow"]

    assert pool.release(path)
    assert visible(pool.directory) == []
    assert free_bytes(pool) == pool.used_bytes() == size_class(100_000)

    with pool.acquire(size_class(100_000)) as again:
        assert inode(again.path) == number
        assert again.path.stat().st_blocks == blocks
        assert again.generation > first_generation
        assert bytes(again.memory[:3]) == b"abc", "recycled memory is stale, not zero"
        assert free_bytes(pool) == 0


def test_pages_are_allocated_before_anything_is_written(pool: SegmentPool) -> None:
    with pool.acquire(MIB) as segment:
        assert segment.path.stat().st_blocks * 512 >= segment.size


def test_an_abandoned_segment_is_free_again(pool: SegmentPool) -> None:
    with pool.acquire(1) as segment:
        number = inode(segment.path)
    with pytest.raises(ValueError, match="abandoned"):
        segment.seal("000001-late-0-1.arrow")
    with pytest.raises(ValueError, match="abandoned"):
        _ = segment.memory
    segment.abandon()
    assert pool.acquire(1).path.stat().st_ino == number


def test_an_error_while_filling_leaves_nothing_visible(pool: SegmentPool) -> None:
    with pytest.raises(RuntimeError), pool.acquire(1):
        raise RuntimeError
    assert visible(pool.directory) == []
    assert free_bytes(pool) == pool.used_bytes()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "000001-a-0-1.txt", "notes.txt"])
def test_a_seal_never_leaves_the_directory_or_hides(pool: SegmentPool, name: str) -> None:
    with pool.acquire(1) as segment, pytest.raises(ValueError, match="cannot be sealed as"):
        segment.seal(name)


def test_a_published_name_is_never_replaced(pool: SegmentPool) -> None:
    with pool.acquire(1) as first, pool.acquire(1) as second:
        first.memory[:1] = b"1"
        path = first.seal("000001-same-0-1.arrow")
        with pytest.raises(FileExistsError, match="generation"):
            second.seal("000001-same-0-1.arrow")
    assert path.read_bytes()[:1] == b"1"


def test_sealing_after_the_directory_was_removed_says_so(pool: SegmentPool) -> None:
    with pool.acquire(1) as segment:
        pool.remove()
        with pytest.raises(FileNotFoundError, match="swept under a live process"):
            segment.seal("000001-late-0-1.arrow")


def test_releasing_twice_or_something_else(pool: SegmentPool) -> None:
    path, _ = sealed(pool, 1)
    assert pool.release(path)
    assert pool.release(path)
    for wrong in (pool.directory.parent / "x", pool.directory / ".free.1.1"):
        with pytest.raises(ValueError, match="not a sealed file"):
            pool.release(wrong)


def test_ordinary_files_count_and_are_removed_not_recycled(pool: SegmentPool) -> None:
    path, size = sealed(pool, MIB)
    weights = pool.directory / "weights-00000003.safetensors"
    weights.write_bytes(bytes(MIB))
    assert pool.used_bytes() == size + MIB
    with weights.open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    assert pool.release(weights)
    assert not weights.exists()
    assert free_bytes(pool) == 0
    assert mapped[5] == 0
    mapped.close()
    assert pool.release(path)


# Affinity


def test_own_mappings_first_then_those_of_others(pool: SegmentPool) -> None:
    own = pool.acquire(MIB)
    mine = inode(own.path)
    with Child(make_free_segments, pool.directory, MIB, 3) as child:
        theirs = set(child.hear())
        child.hear()
        own.abandon()
        taken = [pool.acquire(MIB) for _ in range(4)]
        assert inode(taken[0].path) == mine
        assert {inode(segment.path) for segment in taken[1:]} == theirs
    assert pool.used_bytes() == 4 * MIB
    for segment in taken:
        segment.abandon()


# Removal


def test_removing_free_segments_gives_memory_back_though_idle_processes_map_them(
    pool: SegmentPool,
) -> None:
    with Child(make_free_segments, pool.directory, MIB, 2) as child:
        child.hear()
        child.hear()
        descriptors = [os.open(path, os.O_RDONLY) for path in pool.directory.glob(".free.*")]
        assert len(descriptors) == 2
        assert pool.trim() == 2 * MIB
        for descriptor in descriptors:
            assert os.fstat(descriptor).st_nlink == 0
            assert os.fstat(descriptor).st_blocks == 0
            os.close(descriptor)


def test_removing_a_run_leaves_readers_whole(pool: SegmentPool) -> None:
    leased, size = sealed(pool, MIB, fill=5)
    sealed(pool, MIB)
    pool.release(sealed(pool, 2 * MIB)[0])
    with closing(map_shared(leased, size)) as mapped:
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

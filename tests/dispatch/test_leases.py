"""Leases: read-only mappings that keep segments from being recycled."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from earl_core.dispatch.segments.leases import (
    ShardMismatch,
    map_shared,
)
from earl_core.dispatch.segments.pool import SegmentPool
from tests.dispatch.segments import MIB, drop_idle_mappings, inode, sealed, visible

pytestmark = pytest.mark.usefixtures("nothing_mapped")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_content_is_read_without_a_copy_and_read_only(pool: SegmentPool) -> None:
    path, size = sealed(pool, MIB, fill=8)
    with closing(map_shared(path, size)) as mapped:
        assert mapped.size == size
        assert mapped.memory.readonly
        assert mapped.memory.nbytes == size
        assert mapped.memory[size - 1] == 8
    with pytest.raises(ValueError, match="given back"):
        _ = mapped.memory
    mapped.close()


def test_no_release_under_a_lease(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    first, second = map_shared(path, size), map_shared(path, size)
    assert not pool.release(path)
    first.close()
    assert not pool.release(path)
    second.close()
    assert pool.release(path)
    assert visible(pool.directory) == []


def test_a_released_or_unknown_file_is_gone(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    map_shared(path, size).close()
    assert pool.release(path)
    for missing in (path, pool.directory / "never"):
        with pytest.raises(FileNotFoundError, match="is gone"):
            map_shared(missing, size)


def test_another_size_is_an_error_that_leaves_no_lease(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    with pytest.raises(ShardMismatch, match=f"has {size} bytes, its manifest says {size + 1}"):
        map_shared(path, size + 1)
    assert pool.release(path)
    empty = pool.directory / "empty"
    empty.touch()
    with pytest.raises(ShardMismatch, match="empty"):
        map_shared(empty, 0)


def test_a_link_is_not_followed(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    link = pool.directory / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="no plain file"):
        map_shared(link, size)


def test_a_recycled_segment_is_read_through_the_cached_mapping(pool: SegmentPool) -> None:
    before = descriptors()
    seen = set()
    for fill in range(1, 50):
        path, size = sealed(pool, 1, fill=fill)
        seen.add(inode(path))
        with closing(map_shared(path, size)) as mapped:
            assert set(bytes(mapped.memory)) == {fill}
        assert pool.release(path)
    assert len(seen) == 1
    assert descriptors() <= before + 3


# Views


@pytest.mark.parametrize("kind", ["array", "slice of an array", "memoryview", "slice", "nested"])
def test_closing_under_a_live_view_raises_and_keeps_the_lease(pool: SegmentPool, kind: str) -> None:
    path, size = sealed(pool, 1, fill=7)
    mapped = map_shared(path, size)
    view: object = {
        "array": lambda: np.frombuffer(mapped.memory, dtype=np.uint8),
        "slice of an array": lambda: np.frombuffer(mapped.memory, dtype=np.int32)[3:9],
        "memoryview": lambda: mapped.memory,
        "slice": lambda: mapped.memory[10:20],
        "nested": lambda: np.frombuffer(mapped.memory[64:128], dtype=np.float32)[1:].reshape(3, 5),
    }[kind]()
    with pytest.raises(BufferError, match="still alive") as caught:
        mapped.close()
    assert mapped.memory[0] == 7
    assert not pool.release(path)
    del view
    mapped.close()
    assert pool.release(path)
    assert str(path) in str(caught.value), "the error itself is no view"


def test_torch_tensors_count_as_views(pool: SegmentPool) -> None:
    torch = pytest.importorskip("torch")
    path, size = sealed(pool, 1, fill=7)
    mapped = map_shared(path, size)
    tensor = torch.frombuffer(mapped.memory, dtype=torch.uint8)[5:]
    with pytest.raises(BufferError):
        mapped.close()
    del tensor
    mapped.close()
    assert pool.release(path)


def test_a_dropped_lease_goes_with_its_last_view(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1, fill=7)
    view = np.frombuffer(map_shared(path, size).memory, dtype=np.uint8)[3:]
    assert not pool.release(path)
    assert view[0] == 7
    del view
    assert pool.release(path)


def test_leaving_the_program_with_leases_is_silent(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    script = (
        "import sys, numpy as np; from pathlib import Path;"
        "from earl_core.dispatch.segments.leases import map_shared;"
        "mapped = map_shared(Path(sys.argv[1]), int(sys.argv[2]));"
        "view = np.frombuffer(mapped.memory, dtype=np.uint8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(size)], capture_output=True, check=True
    )
    assert done.stderr == b""
    assert pool.release(path)


# The cache


def test_thousands_of_leases_leak_no_descriptors(pool: SegmentPool) -> None:
    shards = [sealed(pool, 1, name=f"s{number}") for number in range(8)]
    for path, size in shards:
        map_shared(path, size).close()
    before = descriptors()
    for turn in range(4000):
        path, size = shards[turn % 8]
        map_shared(path, size).close()
    assert descriptors() == before
    with pytest.raises(ShardMismatch):
        map_shared(shards[0][0], 1)
    assert descriptors() == before
    drop_idle_mappings()
    assert descriptors() == before - 16


def test_failed_reads_leak_no_descriptors(pool: SegmentPool) -> None:
    path, size = sealed(pool, 1)
    before = descriptors()
    for _ in range(500):
        with pytest.raises(ShardMismatch):
            map_shared(path, size + 1)
        drop_idle_mappings()
        with pytest.raises(FileNotFoundError):
            map_shared(path.with_name("gone"), size)
    assert descriptors() == before


def test_idle_mappings_are_bounded_and_leased_ones_stay(pool: SegmentPool) -> None:
    kept_path, kept_size = sealed(pool, 1, fill=9)
    kept = map_shared(kept_path, kept_size)
    before = descriptors()
    for number in range(200):
        path, size = sealed(pool, 1, name=f"s{number}")
        map_shared(path, size).close()
    written = 64  # the writer's own cache
    assert descriptors() <= before + 2 * 128 + written
    assert kept.memory[5] == 9
    kept.close()


def test_mappings_of_removed_files_go_when_the_next_file_comes(pool: SegmentPool) -> None:
    for number in range(10):
        path, size = sealed(pool, 1, name=f"s{number}")
        map_shared(path, size).close()
        path.unlink()
    path, size = sealed(pool, 1)
    before = descriptors()
    map_shared(path, size).close()
    assert descriptors() <= before + 2
    kept = descriptors()
    drop_idle_mappings()
    assert descriptors() == kept - 2, "one mapping was left, with two descriptors"

"""The room of a pool: what shards may have, beside what published weights need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from earl_core.dispatch.segments.pool import PoolFull, SegmentPool
from earl_core.dispatch.shards.store import ShardStore
from earl_core.run.remote_stores import HostStores
from tests.dispatch.segments import MIB, inode, sealed


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "earl-test", str(tmp_path)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode()}")
    yield tmp_path / "0123456789ab"
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def published(directory: Path, version: int, size: int) -> Path:
    """As `weights.publish` leaves it, which knows no bound but the file system's."""
    pool = SegmentPool(directory, sys.maxsize)
    with pool.acquire(size, exact=True) as segment:
        return segment.seal(f"weights-{version:08d}.safetensors")


def test_weights_do_not_count_for_the_limit_of_shards(directory: Path) -> None:
    pool = SegmentPool(directory, 4 * MIB)
    size = 9 * MIB + 4096
    old = published(directory, 0, size)
    published(directory, 1, size + 64)  # its number has another digit more
    pool.release(old)
    sealed(pool, 3 * MIB)
    sealed(pool, MIB)
    with pytest.raises(PoolFull, match=r"max_bytes is 4,194,304 and 4,194,304 are in use"):
        pool.acquire(MIB)
    assert pool.held()[1:] == (2 * size + 64, 4 * MIB)
    assert pool.used_bytes() == 2 * size + 64 + 4 * MIB
    # What the next version is written into did not go for a shard.
    assert [bytes_ for bytes_, _ in pool.free()] == [size]


def test_the_memory_of_an_older_version_is_used_again(directory: Path) -> None:
    pool = SegmentPool(directory, 4 * MIB)
    first = published(directory, 0, 5 * MIB)
    kept = inode(first)
    published(directory, 1, 5 * MIB)
    pool.release(first)
    assert inode(published(directory, 2, 5 * MIB)) == kept


def test_without_a_number_shards_follow_the_file_system(tmpfs: Path) -> None:
    """3/4 of what two versions of the weights leave: 3/4 x (16 - 2 x 4) MiB."""
    pool = SegmentPool(tmpfs, None)
    published(tmpfs, 0, 4 * MIB)
    sealed(pool, 5 * MIB)
    with pytest.raises(PoolFull, match=r"not set, 6,291,456 and 5,242,880 are in use"):
        pool.acquire(2 * MIB)
    sealed(pool, MIB)
    # Full for shards, and the next version still fits.
    published(tmpfs, 1, 4 * MIB)
    pool.wait_seconds = 3600
    with pytest.raises(PoolFull, match="not set"):
        pool.acquire(7 * MIB)


def test_the_room_for_weights_holds_their_own_and_what_is_free(tmpfs: Path) -> None:
    store = ShardStore(tmpfs, None)
    store.prepare()
    whole = HostStores(store).room()
    assert whole is not None
    assert whole.size == 16 * MIB
    published(tmpfs, 0, 4 * MIB)
    store.pool.release(sealed(store.pool, 2 * MIB)[0])
    assert store.pool.room_for_weights() == whole.free
    sealed(store.pool, 3 * MIB)
    room = HostStores(store).room()
    assert room is not None
    assert room.free == whole.free - 3 * MIB

"""Published weights on a host with a GPU: pages locked once, bytes hashed once, with a stand-in for
the CUDA runtime."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from earl_core.dispatch import ShardStore
from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.tensors import hashing
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.safetensors_layout import open_file
from earl_core.weights.load import manifest_from_directory, open_weights
from tests.engines.models import make
from tests.weights.cuda_runtime import READ_ONLY, stand_in
from tests.weights.test_pages import SHAPE, drop, inode, path_of, version


def test_a_lock_outlives_the_versions_that_use_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two inodes serve all versions: each is locked once for writing and once for reading."""
    runtime = stand_in(monkeypatch)
    last, inodes = version(0, tmp_path), set()
    for number in range(1, 7):
        current = version(number, tmp_path)
        opened = open_weights(current, verify_digest=True)
        inodes.add(inode(current))
        for tensor in opened.values():
            assert runtime.covers(tensor.data_ptr(), tensor.nbytes)
        assert torch.equal(opened["a"], torch.full(SHAPE, float(number)))
        assert not drop(current)
        del opened, tensor
        gc.collect()
        assert drop(last)
        last = current
    assert len(inodes) == 2
    flags = sorted(flags for _, flags in runtime.ranges.values())
    assert flags == [0, 0, READ_ONLY, READ_ONLY]
    assert len(runtime.calls) == 4


def test_a_lock_ends_before_its_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses to unlock what is not mapped."""
    runtime = stand_in(monkeypatch)
    pool = SegmentPool(tmp_path, 2**30)
    drop(version(1, tmp_path))
    assert len(runtime.ranges) == 1
    assert pool.trim()
    assert not runtime.ranges
    # Of a segment that another process removed, the lock would keep the memory.
    gone = version(2, tmp_path)
    path_of(gone).unlink()
    assert len(runtime.ranges) == 1
    version(3, tmp_path, (9, 9))
    assert len(runtime.ranges) == 1
    assert len(runtime.calls) == 3


def test_a_forked_child_leaves_the_locks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = stand_in(monkeypatch)
    segment = SegmentPool(tmp_path, 2**30).acquire(4096)
    assert segment.page_lock()
    child = os.fork()
    if child == 0:
        segment._mapping.close()  # type: ignore[union-attr]
        os._exit(len(runtime.ranges))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    segment.abandon()


def test_without_a_lock_everything_works_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = stand_in(monkeypatch, code=2)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            current = version(number, tmp_path)
            opened = open_weights(current, verify_digest=True)
            assert torch.equal(opened["a"], torch.full(SHAPE, float(number)))
            del opened
            drop(current)
    assert len(runtime.calls) == 2  # it is not asked again
    assert [each.getMessage().count("(error 2)") for each in caplog.records] == [1, 1]


def test_shards_of_the_pool_are_locked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = stand_in(monkeypatch)
    pool = SegmentPool(tmp_path, 2**30)
    for number in range(5):
        segment = pool.acquire(70_000)
        segment.memory[:9] = b"%9d" % number
        size = segment.size
        path = segment.seal(f"{number:06d}-rollout-0-{segment.generation}.arrow")
        mapped = map_shared(path, size)
        assert mapped.page_lock()
        assert bytes(mapped.memory[:9]) == b"%9d" % number
        mapped.close()
        assert pool.release(path)
    assert len(runtime.calls) == 1


def test_what_its_publisher_has_hashed_no_reader_hashes_again(tmp_path: Path) -> None:
    hashed: list[int] = []
    real = hashing.tensor_hash

    def counted(tensor: torch.Tensor) -> str:
        hashed.append(tensor.nbytes)
        return real(tensor)

    with patch.object(hashing, "tensor_hash", counted):
        manifest = version(1, tmp_path)
        size = sum(tensor.nbytes for tensor in open_file(path_of(manifest)).values())
        assert sum(hashed) == size
        for _ in range(3):
            open_weights(manifest, verify_digest=True)
        assert sum(hashed) == size
        # Whoever writes to it, or puts another file there, has its readers look for themselves.
        data = bytearray(path_of(manifest).read_bytes())
        data[-3] ^= 4
        path_of(manifest).write_bytes(data)
        with pytest.raises(WeightsError, match="digest"):
            open_weights(manifest, verify_digest=True)
        assert sum(hashed) == 2 * size
        data[-3] ^= 4
        path_of(manifest).write_bytes(data)
        open_weights(manifest, verify_digest=True)
        assert sum(hashed) == 3 * size


def test_a_model_directory_is_hashed(tmp_path: Path) -> None:
    make("llama_tied", tmp_path / "model")
    manifest = manifest_from_directory(tmp_path / "model", 0)
    with patch.object(hashing, "tensor_hash", lambda tensor: "0" * 32):
        open_weights(manifest)
        with pytest.raises(WeightsError, match="digest"):
            open_weights(manifest, verify_digest=True)


def test_another_versions_pages_do_not_pass_for_hashed(tmp_path: Path) -> None:
    """The mark follows from the digest, and pages are used again."""
    first = version(1, tmp_path)
    drop(first)
    second = version(2, tmp_path)
    assert ShardStore(tmp_path, 2**30).pool.free() == []
    wrong = second.model_copy(update={"digest": first.digest})
    with pytest.raises(WeightsError, match="digest"):
        open_weights(wrong, verify_digest=True)
    open_weights(second, verify_digest=True)

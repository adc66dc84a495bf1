"""The memory of published weights: used again, never under a reader, never half visible."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from earl_core.dispatch import ShardStore
from earl_core.dispatch.segments.pool_directory import MARK, POOL_LOCK
from earl_core.tensors.errors import WeightsError
from earl_core.weights.load import open_weights
from earl_core.weights.manifest import WeightsManifest
from earl_core.weights.publish import publish

SHAPE = (300, 70)


def version(number: int, directory: Path, shape: tuple[int, ...] = SHAPE) -> WeightsManifest:
    weights = {"a": torch.full(shape, float(number)), "b": torch.arange(5.0) * number}
    return publish(weights, directory, number, "float32")


def path_of(manifest: WeightsManifest) -> Path:
    return Path(manifest.files[0].path)


def inode(manifest: WeightsManifest) -> int:
    return path_of(manifest).stat().st_ino


def visible(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if not each.name.startswith("."))


def free(directory: Path) -> int:
    return len(list(directory.glob(".free.*")))


def drop(manifest: WeightsManifest) -> bool:
    """As a run drops an older version."""
    path = path_of(manifest)
    return ShardStore(path.parent, 2**30).pool.release(path)


def test_two_files_serve_all_versions(tmp_path: Path) -> None:
    inodes = []
    last = version(0, tmp_path)
    for number in range(1, 6):
        current = version(number, tmp_path)
        assert drop(last)
        inodes.append(inode(current))
        assert visible(tmp_path) == [path_of(current).name]
        assert torch.equal(load_file(path_of(current))["a"], torch.full(SHAPE, float(number)))
        assert free(tmp_path) == 1
        last = current
    assert len(set(inodes)) == 2


def test_a_reader_keeps_the_old_weights(tmp_path: Path) -> None:
    first = version(1, tmp_path)
    opened = open_weights(first, verify_digest=True)
    kept = opened["a"]
    assert not drop(first)
    second, third = version(2, tmp_path), version(3, tmp_path)
    assert drop(second)
    fourth = version(4, tmp_path)
    assert len({inode(each) for each in (first, third, fourth)}) == 3
    path_of(first).unlink()  # who ignores leases
    assert inode(version(5, tmp_path)) not in (inode(third), inode(fourth))
    assert torch.equal(kept, torch.full(SHAPE, 1.0))
    del opened, kept
    gc.collect()
    assert drop(third)
    assert drop(fourth)
    assert free(tmp_path) == 2
    version(6, tmp_path)
    assert free(tmp_path) == 1


def test_a_view_of_one_tensor_is_a_lease(tmp_path: Path) -> None:
    first = version(1, tmp_path)
    row = open_weights(first)["a"][7, 3:9]
    gc.collect()
    assert not drop(first)
    del row
    gc.collect()
    assert drop(first)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], WeightsManifest]]:
    manifest = version(1, tmp_path / "shared")
    script = """
import sys
from earl_core.weights.load import open_weights
from earl_core.weights.manifest import WeightsManifest
opened = open_weights(WeightsManifest.model_validate_json(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
print(opened["a"].sum().item(), flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, manifest.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process, manifest
    process.kill()
    process.wait()


def test_a_reader_in_another_process_is_safe_and_its_death_frees(
    reader: tuple[subprocess.Popen[str], WeightsManifest], tmp_path: Path
) -> None:
    process, manifest = reader
    assert process.stdin is not None
    assert process.stdout is not None
    directory, first = tmp_path / "shared", inode(manifest)
    assert not drop(manifest)
    inodes = {inode(version(number, directory)) for number in (2, 3)}
    assert first not in inodes
    process.stdin.write("\n")
    process.stdin.flush()
    assert float(process.stdout.readline()) == float(SHAPE[0] * SHAPE[1])
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert drop(manifest)
    assert inode(version(4, directory)) == first


_CRASHES = """
import os, signal, sys
from pathlib import Path
from unittest.mock import patch
from tests.weights.test_pages import version
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
for number, place in enumerate(("write_shares", "digest_together", "Segment.seal")):
    if os.fork() == 0:
        with patch("earl_core.weights.publish." + place, die):
            version(number + 3, Path(sys.argv[1]))
        os._exit(1)
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL, place
"""


def test_a_crash_before_the_end_leaves_nothing_visible(tmp_path: Path) -> None:
    last = version(1, tmp_path)
    drop(version(2, tmp_path))
    subprocess.run([sys.executable, "-c", _CRASHES, tmp_path], check=True)
    assert visible(tmp_path) == [path_of(last).name]
    third = version(3, tmp_path)
    assert torch.equal(open_weights(third, verify_digest=True)["a"], torch.full(SHAPE, 3.0))
    assert torch.equal(open_weights(last, verify_digest=True)["a"], torch.full(SHAPE, 1.0))
    assert free(tmp_path) == 0


def test_a_version_published_again_takes_the_old_ones_place(tmp_path: Path) -> None:
    first = version(1, tmp_path)
    kept = open_weights(first)["a"]
    again = publish({"a": torch.zeros(SHAPE), "b": torch.zeros(5)}, tmp_path, 1, "float32")
    assert visible(tmp_path) == [path_of(again).name]
    assert torch.equal(kept, torch.full(SHAPE, 1.0))
    assert not open_weights(again, verify_digest=True)["a"].any()


def test_weights_have_no_byte_too_many(tmp_path: Path) -> None:
    drop(version(1, tmp_path))
    other = version(2, tmp_path, (50, 3))
    assert path_of(other).stat().st_size == other.bytes
    assert load_file(path_of(other))["a"].shape == (50, 3)


def test_pages_with_holes_are_not_used(tmp_path: Path) -> None:
    first = version(1, tmp_path)
    size = first.bytes
    drop(first)
    (spare,) = tmp_path.glob(".free.*")
    with spare.open("r+b") as file:  # as a writer that was killed while it allocated
        file.truncate(0)
        file.truncate(size)
    second = version(2, tmp_path)
    assert not spare.exists()
    assert path_of(second).stat().st_blocks * 512 >= size


def test_weights_that_are_written_anew_cannot_be_opened(tmp_path: Path) -> None:
    """Between finding the name and taking the lease the pages may go to the next version."""
    manifest = version(1, tmp_path)
    with path_of(manifest).open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="publish the weights again"):
            open_weights(manifest)


def test_only_free_pages_are_given_back(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    drop(version(1, tmp_path))
    last, read = version(2, tmp_path), version(3, tmp_path)
    kept = open_weights(read)["a"]
    assert not drop(read)
    drop(version(4, tmp_path))
    assert store.pool.trim() == last.bytes
    assert visible(tmp_path) == [path_of(last).name, path_of(read).name]
    assert torch.equal(kept, torch.full(SHAPE, 3.0))
    assert torch.equal(open_weights(last, verify_digest=True)["a"], torch.full(SHAPE, 2.0))
    del kept
    gc.collect()
    assert drop(last)
    assert drop(read)
    store.pool.trim()
    assert sorted(os.listdir(tmp_path)) == [POOL_LOCK, MARK]

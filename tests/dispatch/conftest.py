"""A pool in shared memory, a store, and the storages that shards are spilled to."""

from __future__ import annotations

import gc
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from earl_core.dispatch import ShardStore
from earl_core.dispatch.segments.pool import SegmentPool
from tests.dispatch.segments import MIB, SHARED, drop_idle_mappings
from tests.shared import memory_place


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=memory_place("pool-").name, dir=SHARED) as root:
        yield Path(root) / "run"


@pytest.fixture
def pool(directory: Path) -> SegmentPool:
    return SegmentPool(directory, 64 * MIB)


@pytest.fixture
def nothing_mapped() -> Iterator[None]:
    """No mapping is kept from the tests before, nor for those after."""
    drop_idle_mappings()
    yield
    gc.collect()
    drop_idle_mappings()


@pytest.fixture(params=["file", "memory", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spill"
    elif request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}"
    else:
        endpoint = request.getfixturevalue("s3_server")
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }.items():
            monkeypatch.setenv(name, value)
        bucket = f"bucket-{uuid.uuid4().hex}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        fsspec.filesystem("s3").clear_instance_cache()
        yield f"s3://{bucket}/some/prefix"


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "shm" / "run", 2**30)

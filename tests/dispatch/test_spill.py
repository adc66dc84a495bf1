"""Spilled shards: written, read by column and range, restored and removed, on three storages."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from earl_core.config import RunConfig
from earl_core.config.services import DispatchConfig
from earl_core.dispatch import Batch, Manifest, ManifestError, ShardEntry, ShardStore
from earl_core.dispatch.spill import ShardCorrupt, Spill, SpillError, SpillLost
from earl_core.dispatch.spiller import Spiller
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import Columns, ListColumn
from earl_core.trajectory.schema import token_list

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("reason", pa.large_string(), nullable=False),
        pa.field("tokens", token_list(pa.int32()), nullable=False),
        pa.field("advantages", token_list(pa.float32()), nullable=False),
    ]
)


def columns(rows: int = 40, longest: int = 20_000, seed: int = 0) -> Columns:
    """About 5 MiB by default, so that the shard has many blocks."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, rows)
    return {
        "sample_id": np.arange(rows, dtype=np.int64),
        "reason": [f"reason {row} ü" for row in range(rows)],
        "tokens": ListColumn.from_rows([rng.integers(0, 99, n) for n in lengths], "int32"),
        "advantages": ListColumn.from_rows([rng.normal(size=n) for n in lengths], "float32"),
    }


def written(store: ShardStore, given: Columns, stage: str = "rollout") -> ShardEntry:
    return store.write(stage=stage, iteration=0, rank=0, schema=SCHEMA, columns=given)


def row(given: Columns, name: str, at: int) -> np.ndarray:
    column = given[name]
    assert isinstance(column, ListColumn)
    return column.values[column.offsets[at] : column.offsets[at + 1]]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server in this process."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


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


def test_columns_and_ranges_come_back_without_the_rest(url: str, store: ShardStore) -> None:
    given = columns()
    entry = written(store, given)
    spill = Spill(url, "run")
    assert not spill.holds(entry)
    assert spill.put(store.path(entry), entry)
    assert spill.put(store.path(entry), entry)
    assert spill.holds(entry)
    assert spill.names() == [entry.file]
    for name in ("tokens", "advantages"):
        for at in (3, 39, 17):
            (found,) = spill.column(entry, name, [at])
            assert found.dtype == row(given, name, at).dtype
            np.testing.assert_array_equal(found, row(given, name, at))
        every = spill.column(entry, name)
        assert len(every) == 40
        np.testing.assert_array_equal(np.concatenate(every), given[name].values)  # type: ignore[union-attr]
    ids = np.concatenate(spill.column(entry, "sample_id"))
    assert ids.tolist() == list(range(40))
    assert bytes(spill.column(entry, "reason", [7])[0]).decode() == "reason 7 ü"
    with pytest.raises(ValueError, match="no data"):
        spill.read(entry, [(entry.bytes - 4, 8)])


def test_only_the_blocks_asked_for_are_read(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = written(store, columns())
    spill = Spill(f"memory://{uuid.uuid4().hex}", "run")
    spill.put(store.path(entry), entry)
    storage = fsspec.filesystem("memory")
    read = []
    original = type(storage).cat_ranges

    def counted(self: Any, paths: Any, starts: Any, ends: Any, **more: Any) -> Any:
        read.append(sum(end - start for start, end in zip(starts, ends, strict=True)))
        return original(self, paths, starts, ends, **more)

    monkeypatch.setattr(type(storage), "cat_ranges", counted)
    spill.column(entry, "tokens", [5])
    length = 4 * entry.axes["tokens"][5]
    assert length < read[0] <= length + 2 * entry.block_bytes + entry.checksums[1]
    assert read[0] < entry.bytes / 4


def test_a_shard_is_restored_byte_for_byte_and_stock_arrow_opens_the_spill(
    url: str, store: ShardStore, tmp_path: Path
) -> None:
    given = columns()
    entry = written(store, given)
    path = store.path(entry)
    before = path.read_bytes()
    spill = Spill(url, "run")
    spill.put(path, entry)
    path.unlink()
    spill.restore(entry, path)
    assert path.read_bytes() == before
    store.verify(entry, checksum=True)
    with fsspec.open(f"{url}/run/{entry.file}", "rb") as stream:
        batch = pa.ipc.open_file(pa.BufferReader(stream.read())).get_batch(0)
        batch.validate(full=True)
        assert batch.column("tokens")[3].as_py() == row(given, "tokens", 3).tolist()
    assert [each for each in path.parent.iterdir() if each.name.startswith(".writing")] == []


def test_what_is_removed_is_gone_and_reading_it_is_one_error(url: str, store: ShardStore) -> None:
    first = written(store, columns(4, 50))
    second = written(store, columns(4, 50), stage="other")
    spill = Spill(url, "run")
    for entry in (first, second):
        spill.put(store.path(entry), entry)
    spill.delete([first.file, first.file, "never-there.arrow"])
    assert spill.names() == [second.file]
    for use in (
        lambda: spill.column(first, "tokens"),
        lambda: spill.restore(first, store.path(first)),
    ):
        with pytest.raises(SpillLost):
            use()
    spill.remove()
    spill.remove()
    assert spill.names() == []
    assert spill.put(store.path(second), second)
    assert spill.names() == [second.file]


def test_every_corrupt_byte_of_the_data_is_found(store: ShardStore, tmp_path: Path) -> None:
    given = columns(12, 9_000)
    entry = written(store, given)
    url = f"file://{tmp_path}/spill"
    spill = Spill(url, "run")
    spill.put(store.path(entry), entry)
    file = tmp_path / "spill" / "run" / entry.file
    whole = file.read_bytes()
    rng = np.random.default_rng(1)
    ends = (entry.body[0], entry.body[0] + entry.body[1])
    table = (entry.checksums[0], entry.checksums[0] + entry.checksums[1])
    target = tmp_path / "restored.arrow"
    for _ in range(60):
        low, high = ends if rng.random() < 0.7 else table
        at = int(rng.integers(low, high))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(damaged)
        with pytest.raises(ShardCorrupt):
            spill.restore(entry, target)
        assert not target.exists()
        for name in ("tokens", "advantages"):
            try:
                found = spill.column(entry, name)
            except ShardCorrupt:
                continue
            # A block of another column was hit.
            np.testing.assert_array_equal(np.concatenate(found), given[name].values)  # type: ignore[union-attr]
    for size in (0, 100, entry.body[0] + 10, entry.bytes - 1):
        file.write_bytes(whole[:size])
        assert not spill.holds(entry)
        with pytest.raises((ShardCorrupt, SpillError)):
            spill.restore(entry, target)


def test_a_released_shard_is_not_spilled(store: ShardStore, tmp_path: Path) -> None:
    entry = written(store, columns(4, 50))
    store.release(entry)
    spill = Spill(f"file://{tmp_path}/spill", "run")
    assert not spill.put(store.path(entry), entry)
    assert spill.names() == []


def test_unknown_storage_and_contradicting_settings_are_one_clear_error() -> None:
    with pytest.raises(SpillError, match="spill_url"):
        Spill("nothing-like-it://x", "run")
    with pytest.raises(ValidationError, match="contradict"):
        DispatchConfig(durability="spill")
    with pytest.raises(ValidationError, match="contradict"):
        DispatchConfig(spill_url="/somewhere")
    with pytest.raises(ValidationError, match="password"):
        DispatchConfig(durability="spill", spill_url="s3://key:secret@bucket/x")
    assert DispatchConfig(durability="spill", spill_url="sftp://user@host/x").spill_url


@pytest.fixture
def make_spiller(store: ShardStore) -> Iterator[Callable[[str], Spiller]]:
    made: list[Spiller] = []

    def make(url: str) -> Spiller:
        made.append(Spiller(url, "run", store.directory))
        return made[-1]

    yield make
    for spiller in made:
        spiller.close(5)


def test_shards_are_copied_in_the_background_restored_and_released(
    store: ShardStore, tmp_path: Path, make_spiller: Callable[[str], Spiller]
) -> None:
    entries = [written(store, columns(8, 5_000, seed), f"s{seed}") for seed in range(3)]
    url = f"file://{tmp_path}/spill"
    spiller = make_spiller(url)
    assert spiller.lag_bytes == 0
    spiller.submit(entries)
    assert spiller.drain(60)
    assert spiller.lag_bytes == 0
    assert spiller.spilled_bytes == sum(entry.bytes for entry in entries)
    before = store.path(entries[1]).read_bytes()
    store.release(entries[1])
    spiller.restore(entries[1], 60)
    assert store.path(entries[1]).read_bytes() == before
    spiller.release([entries[0].file])
    assert spiller.drain(60)
    with pytest.raises(ManifestError):
        spiller.restore(entries[0], 60)
    assert Spill(url, "run").names() == sorted(entry.file for entry in entries[1:])
    spiller.remove()
    assert Spill(url, "run").names() == []


def test_an_outage_is_one_warning_and_is_made_up_for(
    store: ShardStore,
    tmp_path: Path,
    make_spiller: Callable[[str], Spiller],
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [written(store, columns(4, 50, seed), f"s{seed}") for seed in range(4)]
    blocked = tmp_path / "spill"
    blocked.write_text("a file where the folder should be")
    spiller = make_spiller(f"file://{blocked}")
    spiller.submit(entries[:3])
    assert not spiller.drain(60)
    assert spiller.lag_bytes == sum(entry.bytes for entry in entries[:3])
    assert sum("nothing is lost" in record.message for record in caplog.records) == 1
    for entry in entries:
        store.verify(entry, checksum=True)
    blocked.unlink()
    spiller.submit(entries[3:])
    assert spiller.drain(60)
    assert spiller.lag_bytes == 0
    assert len(Spill(f"file://{blocked}", "run").names()) == 4


def test_a_full_disk_is_one_warning_and_loses_nothing(
    store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = written(store, columns(4, 50))
    spill = Spill(f"file://{tmp_path}/spill", "run")
    storage = type(fsspec.filesystem("file"))

    def full(self: Any, source: str, target: str, **more: Any) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_file", full)
        with pytest.raises(SpillError, match="it is full: free some space"):
            spill.put(store.path(entry), entry)
    assert spill.names() == []
    store.verify(entry, checksum=True)
    assert spill.put(store.path(entry), entry)


def test_a_killed_copier_is_replaced(
    store: ShardStore, tmp_path: Path, make_spiller: Callable[[str], Spiller]
) -> None:
    entries = [written(store, columns(4, 50, seed), f"s{seed}") for seed in range(2)]
    spiller = make_spiller(f"file://{tmp_path}/spill")
    spiller.submit(entries[:1])
    assert spiller.drain(60)
    process = spiller._process
    assert process is not None
    os.kill(process.pid, 9)
    process.wait()
    deadline = time.monotonic() + 10
    while spiller._process is process and time.monotonic() < deadline:
        time.sleep(0.01)
    spiller.submit(entries[1:])
    assert spiller.drain(60)
    assert len(Spill(f"file://{tmp_path}/spill", "run").names()) == 2


def configuration(tmp_path: Path, url: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "iterations": 1,
            "runs_directory": str(tmp_path / "runs"),
            "model": {"path": "nowhere"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 4, "max_turns": 5},
            "dispatch": {
                "directory": str(tmp_path / "shm"),
                "durability": "spill",
                "spill_url": url,
            },
        }
    )


def sealed(run: RunDirectory, entry: ShardEntry) -> Manifest:
    return run.seal(
        Manifest(
            run=run.uid, iteration=0, stage="rollout", key="k", policy_version=0, shards=(entry,)
        )
    )


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_a_resumed_run_gets_lost_shards_back_and_a_finished_one_leaves_nothing(
    tmp_path: Path, url: str
) -> None:
    config = configuration(tmp_path, url)
    given = columns(6, 4_000)
    run = RunDirectory.open(config)
    entry = written(run.store, given)
    manifest = sealed(run, entry)
    run.close()
    run.store.remove()
    resumed = RunDirectory.open(config)
    found = resumed.sealed(0, "rollout", "k")
    assert found is not None
    assert found.digest == manifest.digest
    with Batch(resumed.store, [found], verify=True) as batch:
        np.testing.assert_array_equal(batch.row("tokens", 3), row(given, "tokens", 3))
    assert resumed.spill is not None
    assert resumed.spill.drain(60)
    assert Spill(url, resumed.uid).names() == [entry.file]
    resumed.mark_stable(0)
    assert resumed.spill.drain(60)
    assert Spill(url, resumed.uid).names() == []
    sealed(resumed, written(resumed.store, given, "later"))
    resumed.finish()
    assert Spill(url, resumed.uid).names() == []
    resumed.close()


def test_a_resume_spills_what_the_last_attempt_could_not(tmp_path: Path) -> None:
    config = configuration(tmp_path, f"file://{tmp_path}/spill")
    (tmp_path / "spill").write_text("in the way")
    run = RunDirectory.open(config)
    entry = written(run.store, columns(6, 400))
    sealed(run, entry)
    run.close()
    (tmp_path / "spill").unlink()
    resumed = RunDirectory.open(config)
    assert resumed.sealed(0, "rollout", "k") is not None
    assert resumed.spill is not None
    assert resumed.spill.drain(60)
    assert Spill(f"file://{tmp_path}/spill", resumed.uid).names() == [entry.file]
    resumed.finish()
    resumed.close()


def test_a_shard_lost_in_both_places_repeats_its_stage(tmp_path: Path) -> None:
    config = configuration(tmp_path, f"file://{tmp_path}/spill")
    run = RunDirectory.open(config)
    entry = written(run.store, columns(6, 400))
    sealed(run, entry)
    assert run.spill is not None
    assert run.spill.drain(60)
    run.spill.release([entry.file])
    run.close()
    run.store.remove()
    resumed = RunDirectory.open(config)
    assert resumed.sealed(0, "rollout", "k") is None
    assert any("not usable" in line["event"] for line in resumed.ledger())
    resumed.finish()
    resumed.close()

"""Spilled shards: written, read by column and range, restored and removed, on three storages."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from earl_core.config.services import DispatchConfig
from earl_core.dispatch import ManifestError, ShardStore
from earl_core.dispatch.spill.storage import Spill, SpillError
from tests.dispatch.spilled import UID, columns, row, written


def test_columns_and_ranges_come_back_without_the_rest(url: str, store: ShardStore) -> None:
    given = columns()
    entry = written(store, given)
    spill = Spill(url, UID)
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
    spill = Spill(f"memory://{uuid.uuid4().hex}", UID)
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
    spill = Spill(url, UID)
    spill.put(path, entry)
    path.unlink()
    spill.restore(entry, path)
    assert path.read_bytes() == before
    store.verify(entry, checksum=True)
    with fsspec.open(f"{url}/{UID}/{entry.file}", "rb") as stream:
        batch = pa.ipc.open_file(pa.BufferReader(stream.read())).get_batch(0)
        batch.validate(full=True)
        assert batch.column("tokens")[3].as_py() == row(given, "tokens", 3).tolist()
    assert [each for each in path.parent.iterdir() if each.name.startswith(".writing")] == []


def test_what_is_removed_is_gone_and_reading_it_is_one_error(url: str, store: ShardStore) -> None:
    first = written(store, columns(4, 50))
    second = written(store, columns(4, 50), stage="other")
    spill = Spill(url, UID)
    for entry in (first, second):
        spill.put(store.path(entry), entry)
    spill.delete([first.file, first.file, "never-there.arrow"])
    assert spill.names() == [second.file]
    for use in (
        lambda: spill.column(first, "tokens"),
        lambda: spill.restore(first, store.path(first)),
    ):
        with pytest.raises(ManifestError, match="is not in"):
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
    spill = Spill(url, UID)
    spill.put(store.path(entry), entry)
    file = tmp_path / "spill" / UID / entry.file
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
        with pytest.raises(ManifestError, match="does not match its checksums"):
            spill.restore(entry, target)
        assert not target.exists()
        for name in ("tokens", "advantages"):
            try:
                found = spill.column(entry, name)
            except ManifestError as error:
                if "does not match its checksums" not in str(error):
                    raise
                continue
            # A block of another column was hit.
            np.testing.assert_array_equal(np.concatenate(found), given[name].values)  # type: ignore[union-attr]
    for size in (0, 100, entry.body[0] + 10, entry.bytes - 1):
        file.write_bytes(whole[:size])
        assert not spill.holds(entry)
        with pytest.raises((ManifestError, SpillError)):
            spill.restore(entry, target)


def test_a_released_shard_is_not_spilled(store: ShardStore, tmp_path: Path) -> None:
    entry = written(store, columns(4, 50))
    store.release(entry)
    spill = Spill(f"file://{tmp_path}/spill", UID)
    assert not spill.put(store.path(entry), entry)
    assert spill.names() == []


def test_unknown_storage_and_contradicting_settings_are_one_clear_error() -> None:
    with pytest.raises(SpillError, match="spill_url"):
        Spill("nothing-like-it://x", UID)
    with pytest.raises(ValidationError, match="contradict"):
        DispatchConfig(durability="spill")
    with pytest.raises(ValidationError, match="contradict"):
        DispatchConfig(spill_url="/somewhere")
    assert DispatchConfig(durability="spill", spill_url="sftp://user@host/x").spill_url


def test_a_full_disk_is_one_warning_and_loses_nothing(
    store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = written(store, columns(4, 50))
    spill = Spill(f"file://{tmp_path}/spill", UID)
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

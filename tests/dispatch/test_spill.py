"""Spilled shards: written, read by column and range, restored and removed, on three storages."""

from __future__ import annotations

import errno
import io
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
from tests.dispatch.spilled import SCHEMA, UID, columns, row, spilled, written


def test_a_column_is_read_by_any_arrow_reader_without_the_rest(url: str, store: ShardStore) -> None:
    given = columns()
    entry = written(store, given)
    spill = Spill(url, UID)
    assert spilled(url, UID) == []
    assert spill.put(store.path(entry), entry)
    assert spill.put(store.path(entry), entry)
    assert spilled(url, UID) == [entry.file]
    read = []

    class Counting(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            read.append(size)
            return stream.read(size)  # type: ignore[no-any-return]

        def seek(self, place: int, whence: int = 0) -> int:
            return int(stream.seek(place, whence))

        def tell(self) -> int:
            return int(stream.tell())

        def readable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

    with fsspec.open(f"{url}/{UID}/{entry.file}", "rb") as stream:
        only = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index("tokens")])
        batch = pa.ipc.open_file(pa.PythonFile(Counting(), "r"), options=only).get_batch(0)
        for at in (3, 39, 17):
            found = batch.column("tokens")[at].values.to_numpy()
            assert found.dtype == row(given, "tokens", at).dtype
            np.testing.assert_array_equal(found, row(given, "tokens", at))
    assert batch.num_columns == 1
    assert sum(read) < entry.columns["tokens"].values[1] + 2**17 < entry.bytes


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
    assert spilled(url, UID) == [second.file]
    with pytest.raises(ManifestError, match="is not in"):
        spill.restore(first, store.path(first))
    spill.remove()
    spill.remove()
    assert spilled(url, UID) == []
    assert spill.put(store.path(second), second)
    assert spilled(url, UID) == [second.file]


def test_every_corrupt_byte_of_the_data_is_found(store: ShardStore, tmp_path: Path) -> None:
    entry = written(store, columns(12, 9_000))
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
    for size in (0, 100, entry.body[0] + 10, entry.bytes - 1):
        file.write_bytes(whole[:size])
        with pytest.raises((ManifestError, SpillError)):
            spill.restore(entry, target)


def test_a_released_shard_is_not_spilled(store: ShardStore, tmp_path: Path) -> None:
    entry = written(store, columns(4, 50))
    store.release(entry)
    url = f"file://{tmp_path}/spill"
    spill = Spill(url, UID)
    assert not spill.put(store.path(entry), entry)
    assert spilled(url, UID) == []


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
    url = f"file://{tmp_path}/spill"
    spill = Spill(url, UID)
    storage = type(fsspec.filesystem("file"))

    def full(self: Any, source: str, target: str, **more: Any) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_file", full)
        with pytest.raises(SpillError, match="it is full: free some space"):
            spill.put(store.path(entry), entry)
    assert spilled(url, UID) == []
    store.verify(entry, checksum=True)
    assert spill.put(store.path(entry), entry)

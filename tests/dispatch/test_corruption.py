"""Damaged shards and manifests: always a typed error, never wrong data."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earl_core.dispatch import (
    Batch,
    Manifest,
    ManifestError,
    ShardEntry,
    ShardStore,
)
from earl_core.dispatch.shards.manifest import read_manifest, write_manifest
from earl_core.dispatch.shards.shard import BLOCK_BYTES, verify_blocks
from tests.dispatch.episodes import episode, manifest_of, publish, write


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", max_bytes=2**30)


@pytest.fixture(scope="module")
def sample_store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return ShardStore(tmp_path_factory.mktemp("corrupt"), 2**30)


@pytest.fixture(scope="module")
def several_blocks(sample_store: ShardStore) -> ShardEntry:
    return publish(sample_store)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_bit_is_found(
    sample_store: ShardStore, several_blocks: ShardEntry, data: st.DataObject
) -> None:
    entry = several_blocks
    regions = [entry.body, entry.checksums]
    start, length = data.draw(st.sampled_from(regions))
    at, bit = start + data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))
    with sample_store.path(entry).open("r+b") as file:
        flip(file.fileno(), at, bit)
        try:
            with pytest.raises(ManifestError, match="is corrupt"):
                sample_store.verify(entry, checksum=True)
            with pytest.raises(ManifestError, match="is corrupt"):
                Batch(sample_store, [manifest_of(entry)], verify=True)
            if at < entry.checksums[0]:
                sample_store.verify(entry, checksum=False)
        finally:
            flip(file.fileno(), at, bit)
    sample_store.verify(entry, checksum=True)


def flip(descriptor: int, at: int, bit: int) -> None:
    (byte,) = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 1 << bit]), at)


def test_only_the_blocks_of_a_range_are_verified(
    sample_store: ShardStore, several_blocks: ShardEntry
) -> None:
    entry = several_blocks
    start, length = entry.body
    with sample_store.path(entry).open("r+b") as file, closing(sample_store.open(entry)) as mapped:
        flip(file.fileno(), start + BLOCK_BYTES + 5, 3)
        verify_blocks(mapped.memory, entry, [(start, BLOCK_BYTES)])
        rest = length - 2 * BLOCK_BYTES
        verify_blocks(mapped.memory, entry, [(start + 2 * BLOCK_BYTES, rest), (start, 3)])
        verify_blocks(mapped.memory, entry, [(start + BLOCK_BYTES + 5, 0)])
        for first, size in ((start, BLOCK_BYTES + 1), (start + 2 * BLOCK_BYTES - 1, 1)):
            with pytest.raises(ManifestError, match="is corrupt"):
                verify_blocks(mapped.memory, entry, [(start, 1), (first, size)])
        flip(file.fileno(), start + BLOCK_BYTES + 5, 3)
        for first, size in ((start - 1, 1), (start, length + 1), (start, -1)):
            with pytest.raises(ManifestError, match="outside"):
                verify_blocks(mapped.memory, entry, [(start, 1), (first, size)])


def test_cut_and_exchanged_shards_are_found(store: ShardStore) -> None:
    first, second = publish(store), publish(store, 0.75)
    os.rename(store.path(second), store.path(first))
    with pytest.raises(ManifestError, match="is corrupt"):
        store.verify(first, checksum=True)
    data = store.path(first).read_bytes()
    store.path(first).unlink()
    store.path(first).write_bytes(data[:-8])
    with pytest.raises(ManifestError, match="its manifest says"):
        Batch(store, [manifest_of(first)])
    other = first.model_copy(update={"generation": 7})
    with pytest.raises(ManifestError, match="another generation"):
        store.verify(other, checksum=False)


def test_manifest_is_checked_on_reading(tmp_path: Path, store: ShardStore) -> None:
    path = tmp_path / "rollout.json"
    write_manifest(path, write(store, [episode(0, [(2, 3)])]))
    assert read_manifest(path).stage == "rollout"
    path.write_text(path.read_text().replace('"policy_version": 4', '"policy_version": 5'))
    with pytest.raises(ManifestError, match=r"damaged.*digest"):
        read_manifest(path)
    path.write_text("{")
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(path)
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "nothing.json")


def test_a_manifest_of_another_version_is_called_that(tmp_path: Path, store: ShardStore) -> None:
    path = tmp_path / "rollout.json"
    write_manifest(path, write(store, [episode(0, [(2, 3)])]))
    path.write_text(path.read_text().replace("earl.manifest/3", "earl.manifest/2"))
    words = "it has format earl.manifest/2, this version reads earl.manifest/3"
    with pytest.raises(ManifestError, match=words) as caught:
        read_manifest(path)
    assert "damaged" not in str(caught.value)


def test_an_edited_copy_of_an_entry_has_another_layout(store: ShardStore) -> None:
    (entry,) = write(store, [episode(n, [(2, 3)]) for n in range(2)]).shards
    before = entry.layout
    other = entry.model_copy(update={"row_ids": (0, 5)})
    assert other.layout != before == entry.layout
    assert other.ids.tolist() == [0, 5]


@pytest.fixture(scope="module")
def manifest_text(sample_store: ShardStore) -> bytes:
    manifest = write(sample_store, [episode(n, [(2, 3)]) for n in range(3)])
    named = manifest.model_copy(update={"metrics": {"seconds": 12.25}, "outputs": {"a": [1, "b"]}})
    path = sample_store.directory / "manifest.json"
    write_manifest(path, named)
    return path.read_bytes()


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_damaged_manifest_is_an_error_or_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, manifest_text: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    text = bytearray(manifest_text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        form = data.draw(st.sampled_from(["flip", "cut", "insert", "remove"]))
        if form == "flip":
            text[at] ^= 1 << data.draw(st.integers(0, 7))
        elif form == "cut":
            del text[at + 1 :]
        elif form == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        else:
            del text[at : at + data.draw(st.integers(1, 40))]
        if not text:
            break
    path.write_bytes(text)
    try:
        found = read_manifest(path)
    except ManifestError:
        return
    assert found == Manifest.model_validate(json.loads(manifest_text))


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", ".hidden", "a/b.arrow", "x\n"])
def test_a_manifest_cannot_name_a_file_outside_the_store(store: ShardStore, name: str) -> None:
    entry = write(store, [episode(0, [(2, 3)])]).shards[0]
    with pytest.raises(ValueError, match="file"):
        ShardEntry.model_validate({**entry.model_dump(), "file": name})


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_entry_reaches_beyond_its_shard(
    sample_store: ShardStore, several_blocks: ShardEntry, data: st.DataObject
) -> None:
    """Numbers changed at will: the entry is refused, or all its ranges lie inside of the body."""
    dumped = several_blocks.model_dump(mode="json")
    numbers = list(places(dumped))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(numbers))
        holder[key] = data.draw(st.integers(-10, 3_000_000))
    try:
        entry = ShardEntry.model_validate(dumped)
    except ValueError:
        return
    start, stop = entry.body[0], sum(entry.body)
    for column in entry.columns.values():
        for span in (column.values, column.offsets):
            assert span is None or start <= span[0] <= sum(span) <= stop <= entry.bytes


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Every whole number in plain JSON, as its container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    found: list[tuple[dict | list, str | int]] = []
    for key, item in items:
        if isinstance(item, dict | list):
            found += places(item)
        elif isinstance(item, int):
            found.append((value, key))  # type: ignore[arg-type]
    return found

"""What is promised of ranges that come from another host."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earl_core.dispatch import ManifestError, ShardEntry, ShardStore
from earl_core.dispatch.remote import (
    Proof,
    RemoteRead,
    TransportError,
)
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.tcp import TcpTransport
from earl_core.dispatch.remote.transport import Range
from tests.dispatch.hosts import TOKEN, destination, file_bytes, make_shard, soon, whole

ROWS = [70_000, 0, 3, 130_000, 1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardStore]:
    made = ShardStore(tmp_path / "run", 2**28)
    yield made
    made.remove()


@pytest.fixture
def entry(store: ShardStore) -> ShardEntry:
    return make_shard(store, ROWS)


@pytest.fixture
def transport(store: ShardStore) -> Iterator[TcpTransport]:
    with RangeServer(store.directory, TOKEN) as server:
        made = TcpTransport({"a": server.address}, TOKEN)
        yield made
        made.close()


def read(transport: TcpTransport, entry: ShardEntry, *ranges: Range) -> list[bytes]:
    into = destination(*ranges)
    transport.read_all({"a": RemoteRead(ranges, into)}, {entry.file: Proof.of(entry)})
    return [bytes(view) for view in into]


def test_whole_columns_and_pieces_arrive_exactly(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry
) -> None:
    start, length = entry.columns["tokens"].values
    pieces = [
        Range(entry.file, entry.generation, start + 7, 1),
        Range(entry.file, entry.generation, start + 250_001, 300_003),
        Range(entry.file, entry.generation, start + 7, 100),
        Range(entry.file, entry.generation, start + length - 1, 1),
    ]
    wanted = [whole(entry, name) for name in entry.columns] + pieces
    assert read(transport, entry, *wanted) == [file_bytes(store, item) for item in wanted]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 3 * 10**5)), max_size=12))
def test_any_ranges(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry, spans: list[tuple[int, int]]
) -> None:
    begin, size = entry.body
    ranges = [
        Range(entry.file, entry.generation, begin + start % size, min(length, size - start % size))
        for start, length in spans
    ]
    assert read(transport, entry, *ranges) == [file_bytes(store, item) for item in ranges]


def test_many_small_ranges_and_several_files(transport: TcpTransport, store: ShardStore) -> None:
    entries = [make_shard(store, [50, 9], first=2 * n) for n in range(270)]
    ranges = [
        Range(e.file, e.generation, e.columns["tokens"].values[0] + 16 * n, 4)
        for e in entries
        for n in range(3)
    ]
    into = destination(*ranges)
    proofs = {e.file: Proof.of(e) for e in entries}
    transport.read_all({"a": RemoteRead(ranges, into)}, proofs)
    assert [bytes(view) for view in into] == [file_bytes(store, item) for item in ranges]


def test_reads_into_typed_memory(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry
) -> None:
    item = whole(entry)
    values = np.zeros(item.length // 4, np.int32)
    transport.read_all(
        {"a": RemoteRead([item], [memoryview(values)])}, {entry.file: Proof.of(entry)}
    )
    assert values.tobytes() == file_bytes(store, item)


@pytest.mark.parametrize(
    "where",
    [
        lambda e: (0, 64),
        lambda e: (e.body[0] + e.body[1] - 8, 16),
        lambda e: (e.checksums[0], e.checksums[1]),
        lambda e: (e.bytes - 8, 8),
        lambda e: (e.bytes + 4096, 8),
        lambda e: (2**63, 8),
    ],
)
def test_ranges_outside_of_the_data_are_refused(
    transport: TcpTransport, entry: ShardEntry, where: Callable[[ShardEntry], tuple[int, int]]
) -> None:
    with pytest.raises(TransportError, match="outside"):
        read(transport, entry, Range(entry.file, entry.generation, *where(entry)))
    assert read(transport, entry, whole(entry)), "the transport works on after a refusal"


@pytest.mark.parametrize(
    "name",
    [
        "../{}",
        "/etc/passwd",
        "..",
        ".pool.lock",
        "sub/{}",
        "owner.json",
        "w.safetensors",
        "",
        "{}\0",
    ],
)
def test_other_names_are_refused(transport: TcpTransport, entry: ShardEntry, name: str) -> None:
    file = name.format(entry.file)
    item = whole(entry)._replace(file=file)
    proofs = {file: replace(Proof.of(entry), file=file)}
    with pytest.raises(TransportError, match="not the name of a sealed shard"):
        transport.read_all({"a": RemoteRead([item], destination(item))}, proofs)


def test_a_link_out_of_the_run_is_not_followed(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry, tmp_path: Path
) -> None:
    outside = tmp_path / entry.file
    (store.directory / entry.file).rename(outside)
    (store.directory / entry.file).symlink_to(outside)
    with pytest.raises((TransportError, OSError)):
        read(transport, entry, whole(entry))


def test_a_released_shard_is_gone(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry
) -> None:
    read(transport, entry, whole(entry))
    assert soon(lambda: store.release(entry))
    with pytest.raises(TransportError, match="is not on host"):
        read(transport, entry, whole(entry))


def test_an_old_generation_is_gone(transport: TcpTransport, entry: ShardEntry) -> None:
    proof = replace(Proof.of(entry), generation=entry.generation - 1)
    item = whole(entry)._replace(generation=entry.generation - 1)
    with pytest.raises(TransportError, match="is not of generation"):
        transport.read_all({"a": RemoteRead([item], destination(item))}, {entry.file: proof})
    with pytest.raises(TransportError, match="same manifests"):
        transport.read_all(
            {"a": RemoteRead([item], destination(item))}, {entry.file: Proof.of(entry)}
        )


def test_no_lease_stays_after_reading(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry
) -> None:
    read(transport, entry, whole(entry))
    with pytest.raises(TransportError, match="outside"):
        read(transport, entry, Range(entry.file, entry.generation, 0, 8))
    assert soon(lambda: store.release(entry))


@pytest.mark.parametrize("part", ["body", "checksums"])
def test_damaged_memory_of_the_producer_is_found(
    transport: TcpTransport, store: ShardStore, entry: ShardEntry, part: str
) -> None:
    item = whole(entry)
    place = item.start + 300_000 if part == "body" else entry.checksums[0] + 3
    with open(store.path(entry), "r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 1]))
    with pytest.raises(TransportError, match="resume the run"):
        read(transport, entry, item)
    if part == "body":
        reward = whole(entry, "reward")
        assert read(transport, entry, reward) == [file_bytes(store, reward)], "another block"


def test_a_pending_checksum_is_refused(entry: ShardEntry) -> None:
    with pytest.raises(ManifestError, match="seal the manifest"):
        Proof.of(entry.model_copy(update={"checksum": ""}))


def test_descriptions_that_contradict_themselves_are_refused(
    transport: TcpTransport, entry: ShardEntry
) -> None:
    proof = Proof.of(entry)
    item = whole(entry)
    for wrong in (
        replace(proof, block_bytes=1),
        replace(proof, checksums=(entry.bytes, entry.checksums[1])),
        replace(proof, body=(entry.body[0], entry.bytes)),
        replace(proof, bytes=2**62, body=(0, 2**61)),
    ):
        with pytest.raises(TransportError, match="contradicts itself"):
            transport.read_all({"a": RemoteRead([item], destination(item))}, {entry.file: wrong})


def test_a_destination_of_another_length_is_a_mistake(
    transport: TcpTransport, entry: ShardEntry
) -> None:
    with pytest.raises(ValueError, match="exactly its length"):
        transport.read_all({"a": RemoteRead([whole(entry)], [memoryview(bytearray(3))])}, {})


def test_several_threads(transport: TcpTransport, store: ShardStore, entry: ShardEntry) -> None:
    wanted = [whole(entry, name) for name in entry.columns]
    expected = [file_bytes(store, item) for item in wanted]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda _: read(transport, entry, *wanted), range(24)))
    assert all(result == expected for result in results)


def _read_in_child(transport: TcpTransport, entry: ShardEntry, queue: object) -> None:
    queue.put(read(transport, entry, whole(entry)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children(transport: TcpTransport, entry: ShardEntry, method: str) -> None:
    before = read(transport, entry, whole(entry))
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(transport, entry, queue))
    child.start()
    during = read(transport, entry, whole(entry))
    assert queue.get(timeout=60) == before == during
    child.join(60)
    assert read(transport, entry, whole(entry)) == before, "the parent's connections live on"

"""Measure the speed at which a host fetches shards of another one."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from earl_core.dispatch.remote.tcp import TcpTransport
from earl_core.dispatch.remote.transport import Range, RemoteRead
from earl_core.dispatch.shards.manifest import ShardEntry
from earl_core.dispatch.shards.shard import Proof
from earl_core.dispatch.shards.store import ShardStore

_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field(
            "bytes", pa.large_list(pa.field("item", pa.uint8(), nullable=False)), nullable=False
        ),
    ]
)
_BYTES = 16 * 2**20
_ROUNDS = 3
"""Rounds of a measurement. In the first both sides connect, and first touch their memory."""


def publish_probe(store: ShardStore) -> ShardEntry:
    """A shard for others to fetch. Raises `PoolFull`."""
    with store.create(
        stage="probe",
        iteration=0,
        rank=0,
        schema=_SCHEMA,
        rows=1,
        lengths={"bytes": np.array([_BYTES], dtype=np.int64)},
    ) as writer:
        return store.complete(writer.seal())


def fetch_probe(entry: ShardEntry, address: tuple[str, int], token: str) -> float:
    """bytes/s at which a probe comes from the host at this address. Raises `TransportError`."""
    start, length = entry.body
    into = memoryview(bytearray(length))
    wanted = RemoteRead([Range(entry.file, entry.generation, start, length)], [into])
    transport = TcpTransport({entry.host: address}, token)
    seconds = []
    try:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            transport.read_all({entry.host: wanted}, {entry.file: Proof.of(entry)})
            seconds.append(time.perf_counter() - began)
    finally:
        transport.close()
    return length / min(seconds)

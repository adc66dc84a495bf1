"""Several hosts on one machine: a directory, a store and a range server each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from earl_core.dispatch import Manifest, ShardEntry, ShardStore
from earl_core.dispatch.remote import Proof, RemoteRead
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.tcp import ClientLimits, TcpTransport
from earl_core.dispatch.remote.transport import Range
from earl_core.trajectory.schema import per_token

TOKEN = "a token of the tests"


def _list(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, pa.large_list(pa.field("item", kind, nullable=False)), nullable=False)


SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        per_token("tokens", pa.int32()),
        per_token("loss_mask", pa.int8()),
        _list("turn_starts", pa.int32()),
        pa.field("finish_reason", pa.large_string(), nullable=False),
    ]
)


@contextmanager
def as_host(name: str) -> Iterator[None]:
    """This process is `name` for a while."""
    before = os.environ.get("EARL_HOST")
    os.environ["EARL_HOST"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["EARL_HOST"]
        else:
            os.environ["EARL_HOST"] = before


def make_shard(
    store: ShardStore, lengths: Sequence[int], first: int = 0, host: str = "a", seed: int = 0
) -> ShardEntry:
    """A completed shard with rows `first, first + 1, ...` of these token counts."""
    draw = np.random.default_rng((seed, first))
    rows = len(lengths)
    turns = np.array([length % 3 for length in lengths], np.int64)
    reasons = ["done", "", "länge"]
    with (
        as_host(host),
        store.create(
            stage="rollout",
            iteration=1,
            rank=0,
            schema=SCHEMA,
            rows=rows,
            lengths={
                "tokens": np.array(lengths, np.int64),
                "loss_mask": np.array(lengths, np.int64),
                "turn_starts": turns,
            },
            strings={"finish_reason": [reasons[(first + row) % 3] for row in range(rows)]},
        ) as writer,
    ):
        writer.values("sample_id")[:] = np.arange(first, first + rows)
        writer.values("reward")[:] = draw.random(rows)
        for name, most in (("tokens", 2**31 - 1), ("loss_mask", 2), ("turn_starts", 99)):
            values = writer.values(name)
            values[:] = draw.integers(0, most, len(values))
        return store.complete(writer.seal())


def manifest(entries: Sequence[ShardEntry]) -> Manifest:
    return Manifest(
        run="r", iteration=1, stage="rollout", key="k", policy_version=1, shards=tuple(entries)
    ).sealed()


@dataclass
class Hosts:
    """Named hosts, each with its store and its server; `sent` counts bytes that were asked for."""

    stores: dict[str, ShardStore]
    servers: dict[str, RangeServer] = field(default_factory=dict)

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        return {name: server.address for name, server in self.servers.items()}

    def transport(self, limits: ClientLimits | None = None) -> Counting:
        return Counting(self.addresses, TOKEN, limits)


class Counting(TcpTransport):
    """Counts the bytes that came over the wire."""

    received = 0

    def read_all(self, reads: dict[str, RemoteRead], proofs: dict[str, Proof]) -> None:
        super().read_all(reads, proofs)
        self.received += sum(item.length for read in reads.values() for item in read.ranges)


@contextmanager
def several_hosts(directory: Path, names: Sequence[str]) -> Iterator[Hosts]:
    hosts = Hosts({name: ShardStore(directory / name / "run", 2**28) for name in names})
    try:
        for name, store in hosts.stores.items():
            store.prepare()
            hosts.servers[name] = RangeServer(store.directory, TOKEN)
        yield hosts
    finally:
        for server in hosts.servers.values():
            server.close()
        for store in hosts.stores.values():
            store.remove()


def whole(entry: ShardEntry, column: str = "tokens") -> Range:
    return Range(entry.file, entry.generation, *entry.columns[column].values)


def destination(*ranges: Range) -> list[memoryview]:
    return [memoryview(bytearray(item.length)) for item in ranges]


def file_bytes(store: ShardStore, item: Range) -> bytes:
    return (store.directory / item.file).read_bytes()[item.start : item.start + item.length]


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True

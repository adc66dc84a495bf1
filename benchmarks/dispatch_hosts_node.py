"""One host of `dispatch_hosts`: a process that serves its shards and one that works.

Both enter the host's namespace first. The worker does what it is told and answers with the time at
which it was done; all processes share the machine's monotonic clock. The received rows
are compared with those that the producers wrote, one by one, outside of the measured time.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.dispatch.reads.plan import DispatchPlan, Layout, make_plan
from earl_core.dispatch.remote import Proof, Range, RemoteRead
from earl_core.dispatch.remote.fetch import fetch
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.tcp import ClientLimits, TcpTransport
from earl_core.dispatch.segments.segment import Segment
from earl_core.dispatch.shards.shard import ShardWriter
from tools.namespaces import Network
from tools.traffic import Traffic

COLUMNS = {
    "tokens": "int32",
    "loss_mask": "int8",
    "rollout_logprobs": "float32",
    "old_logprobs": "float32",
    "advantages": "float32",
}
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())
PORT = 7213
LIMITS = ClientLimits(request_bytes=32 * 1024, bytes_in_flight=128 * 1024)
"""Limits of either way. The defaults suit faster links: on slow ones they only make queues."""
_TOKEN = "benchmark"
_MAX_BYTES = 2**30


def host_names(hosts: int) -> tuple[str, ...]:
    """Names of the hosts, in order."""
    return tuple(f"host{number:02d}" for number in range(hosts))


def row_values(row: int, tokens: int) -> dict[str, np.ndarray]:
    """Make the values that the producer of a row writes into its columns."""
    base = (np.arange(tokens, dtype=np.int64) * 7919 + row * 104_729) % 151_936
    share = base.astype(np.float32) / np.float32(151_936)
    values = {
        "tokens": base,
        "loss_mask": base % 3 == 0,
        "rollout_logprobs": -share,
        "old_logprobs": -share * np.float32(0.5),
        "advantages": share - np.float32(row),
    }
    return {name: values[name].astype(dtype) for name, dtype in COLUMNS.items()}


def enter(network: Network, host: int) -> None:
    """Let this process be one of a host's."""
    network.enter(host)
    os.environ["EARL_HOST"] = host_names(network.hosts)[host]


class Server:
    """Serves a host's shards as long as its process lives."""

    def __init__(self, host: int, network: Network, directory: Path) -> None:
        enter(network, host)
        place = directory / str(host)
        place.mkdir(parents=True, exist_ok=True)
        self._server = RangeServer(place, _TOKEN, host=network.address(host), port=PORT)


@dataclass(frozen=True)
class Received:
    """The number of rows that a host received, and whether every one is right."""

    rows: int
    right: bool


class Worker:
    """A host's rank: produces rows, then takes part in either way of bringing them to others."""

    def __init__(self, host: int, network: Network, directory: Path) -> None:
        enter(network, host)
        self.names = host_names(network.hosts)
        self.name = self.names[host]
        self.host = host
        self.store = ShardStore(directory / str(host), _MAX_BYTES)
        addresses = {n: (network.address(h), PORT) for h, n in enumerate(self.names)}
        self.transport = TcpTransport(addresses, _TOKEN, LIMITS)
        self.lengths: Sequence[int] = ()
        self.plan: DispatchPlan | None = None
        self.made: list[ShardEntry] = []
        self.batch: Batch | None = None
        self.segment: Segment | None = None
        gc.disable()

    def produce(self, rows: Sequence[int], lengths: Sequence[int]) -> ShardEntry | None:
        """Write this host's rows, if any, into a shard; the one before is released. lengths: of
        all rows."""
        self._release()
        self.lengths = lengths
        if not rows:
            return None
        with self._create("rollout", rows) as writer:
            for index, row in enumerate(rows):
                for name, values in row_values(row, lengths[row]).items():
                    writer.rows(name)[index][:] = values
            entry = self.store.complete(writer.seal())
        self.made.append(entry)
        return entry

    def prepare(self, manifest: Manifest, owner: Sequence[int] | None) -> tuple[int, int, int]:
        """Plan, or with `owner` instead; returns the moved, needed and busiest link's bytes."""
        layout = Layout(data_parallel=len(self.names), hosts=self.names)
        plan = make_plan([manifest], layout)
        if owner is not None:
            plan = replace(plan, owner=np.asarray(owner, dtype=np.int64))
        self.plan = plan
        traffic = Traffic(plan)
        return traffic.moved_bytes, traffic.needed_bytes, traffic.plan.busiest_bytes

    def greet(self) -> None:
        """Read a little from every other host, so that all connections are open, as in a run
        whose rows go elsewhere in every iteration."""
        assert self.plan is not None
        for entry in self.plan.entries:
            if entry.host != self.name:
                item = Range(entry.file, entry.generation, entry.body[0], 8)
                into = [memoryview(bytearray(8))]
                self.transport.read_all(
                    {entry.host: RemoteRead([item], into)}, {entry.file: Proof.of(entry)}
                )

    # Ours

    def fetch(self, start: float) -> float:
        """Get this rank's rows straight from their producers; when that was done."""
        assert self.plan is not None
        _sleep_until(start)
        self.batch = fetch(self.plan, self.host, self.store, self.transport)
        return time.monotonic()

    def check_fetched(self) -> Received:
        """Compare the rows, and give them back. Once all hosts are done: it takes their time."""
        assert self.batch is not None
        right = True
        for index, row in enumerate(self.batch.rows.tolist()):
            for name, values in row_values(row, self.lengths[row]).items():
                right &= bool(np.array_equal(self.batch.row(name, index), values))
        received = Received(len(self.batch), right)
        self.batch.close()
        self.batch = None
        return received

    # The single controller's way

    def gather(self, start: float) -> list[ShardEntry]:
        """Bring all rows here, each into the shard of the host that is to have it. Nothing is
        concatenated or split: every column is received where it is sent from."""
        assert self.plan is not None
        _sleep_until(start)
        writers = [
            self._create("gathered", self.plan.rows(rank).tolist())
            for rank in range(len(self.names))
        ]
        reads: dict[str, tuple[list[Range], list[memoryview]]] = {}
        proofs = {entry.file: Proof.of(entry) for entry in self.plan.entries}
        for rank, writer in enumerate(writers):
            sources = self.plan.sources_of(rank)
            for name in COLUMNS:
                place = sources.columns[name]
                views = writer.rows(name)
                spans = (place.shard.tolist(), place.start.tolist(), place.length.tolist())
                for shard, begin, length, view in zip(*spans, views, strict=True):
                    entry = self.plan.entries[shard]
                    ranges, into = reads.setdefault(entry.host, ([], []))
                    ranges.append(Range(entry.file, entry.generation, begin, length))
                    into.append(memoryview(view).cast("B"))
        remote = {host: RemoteRead(*read) for host, read in reads.items() if host != self.name}
        here = RemoteRead(*reads.get(self.name, ([], [])))
        copying = threading.Thread(target=self._copy, args=(here,))
        copying.start()
        self.transport.read_all(remote, proofs)
        copying.join()
        entries = [self.store.complete(writer.seal()) for writer in writers]
        self.made += entries
        return entries

    def _copy(self, read: RemoteRead) -> None:
        """Copy what lies here into place."""
        assert self.plan is not None
        entries = {entry.file: entry for entry in self.plan.entries}
        files = {item.file for item in read.ranges}
        mapped = {file: self.store.open(entries[file]) for file in files}
        for item, into in zip(read.ranges, read.into, strict=True):
            into[:] = mapped[item.file].memory[item.start : item.start + item.length]
        for one in mapped.values():
            one.close()

    def scatter(self, entry: ShardEntry) -> float:
        """Take this host's shard from the controller's host; when that was done."""
        if entry.host != self.name:
            begin, size = entry.body
            self.segment = self.store.pool.acquire(entry.bytes)
            item = Range(entry.file, entry.generation, begin, size)
            into = self.segment.memory[begin : begin + size]
            self.transport.read_all(
                {entry.host: RemoteRead([item], [into])}, {entry.file: Proof.of(entry)}
            )
        return time.monotonic()

    def check_scattered(self, entry: ShardEntry) -> Received:
        """Compare the rows, and give them back."""
        if self.segment is None:
            with closing(self.store.open(entry)) as mapped:
                return Received(entry.rows, self._right(mapped.memory, entry))
        received = Received(entry.rows, self._right(self.segment.memory, entry))
        self.segment.abandon()
        self.segment = None
        return received

    def tidy(self) -> None:
        """Release what gathering made."""
        for entry in self.made[1:]:
            _release(self.store, entry)
        del self.made[1:]

    def _right(self, memory: memoryview, entry: ShardEntry) -> bool:
        right = True
        for name in COLUMNS:
            start, length = entry.columns[name].values
            values = np.frombuffer(memory[start : start + length], dtype=COLUMNS[name])
            stops = np.cumsum([self.lengths[row] for row in entry.row_ids])
            for found, row in zip(np.split(values, stops[:-1]), entry.row_ids, strict=True):
                expected = row_values(row, self.lengths[row])[name]
                right &= bool(np.array_equal(found, expected))
        return right

    def _create(self, stage: str, rows: Sequence[int]) -> ShardWriter:
        fields = [
            pa.field(name, pa.large_list(pa.field("item", _ARROW[dtype], nullable=False)), False)
            for name, dtype in COLUMNS.items()
        ]
        schema = pa.schema([pa.field("sample_id", pa.int64(), nullable=False), *fields])
        counts = np.array([self.lengths[row] for row in rows], dtype=np.int64)
        lengths: Mapping[str, np.ndarray] = dict.fromkeys(COLUMNS, counts)
        writer = self.store.create(
            stage=stage, iteration=0, rank=0, schema=schema, rows=len(rows), lengths=lengths
        )
        writer.values("sample_id")[:] = rows
        return writer

    def _release(self) -> None:
        for entry in self.made:
            _release(self.store, entry)
        self.made.clear()


_ARROW: dict[str, Any] = {"int32": pa.int32(), "int8": pa.int8(), "float32": pa.float32()}


def _release(store: ShardStore, entry: ShardEntry) -> None:
    deadline = time.monotonic() + 10.0
    # A server gives its lease back a moment after its answer was taken.
    while not store.release(entry):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{entry.file} is still being read")
        time.sleep(0.001)


def _sleep_until(start: float) -> None:
    time.sleep(max(0.0, start - time.monotonic()))

"""Producers, stages and layouts for the tests of plans, with plain byte arrays for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from earl_core.dispatch.reads.plan import DispatchPlan, Layout
from earl_core.dispatch.reads.sources import sample_ids
from earl_core.dispatch.remote.incoming import incoming_of
from earl_core.dispatch.shards.manifest import ColumnRange, Manifest, ShardEntry
from tools.traffic import Traffic

HOSTS = ("alder", "birch", "cedar", "douglas")
ROLLOUT = {
    "sample_id": ("int64", None),
    "finish_reason": ("string", "finish_reason"),
    "tokens": ("int32", "tokens"),
    "loss_mask": ("uint8", "tokens"),
    "turn_starts": ("int32", "turn_starts"),
}
REWARD = {"sample_id": ("int64", None), "reward": ("float32", None)}
ADVANTAGE = {"sample_id": ("int64", None), "advantages": ("float32", "advantages")}
Lengths = dict[str, dict[int, int]]


@dataclass
class World:
    """Files of all hosts, and what every row of every column really is."""

    files: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    truth: dict[tuple[str, int], bytes] = field(default_factory=dict)
    seed: int = 0

    def shard(
        self, stage: str, host: str, ids: Sequence[int], columns: dict[str, Any], lengths: Lengths
    ) -> ShardEntry:
        """One producer's shard: columns one after another, each at a multiple of 64."""
        generator = np.random.default_rng(self.seed)
        self.seed += 1
        content, spans = bytearray(generator.bytes(64)), {}
        for name, (dtype, axis) in columns.items():
            offsets = (len(content), 8 * (len(ids) + 1)) if axis else None
            content += generator.bytes(-(-offsets[1] // 64) * 64) if offsets else b""
            start = len(content)
            for row in ids:
                elements = lengths[axis][row] if axis else 1
                width = 1 if dtype == "string" else np.dtype(dtype).itemsize
                value = generator.bytes(elements * width)
                if name == "sample_id":
                    value = np.int64(row).tobytes()
                self.truth[name, row] = value
                content += value
            values = (start, len(content) - start)
            spans[name] = ColumnRange(dtype=dtype, values=values, offsets=offsets, axis=axis)
            content += generator.bytes(-len(content) % 64)
        body = (64, len(content) - 64)
        table = (len(content), 8 * (1 - (-body[1] // 256)))
        content += generator.bytes(table[1])
        file = f"000001-{stage}-{len(self.files)}-{self.seed}.arrow"
        self.files[host, file] = np.frombuffer(bytes(content), dtype=np.uint8)
        axes = {
            axis: tuple(lengths[axis][row] for row in ids) for _, axis in columns.values() if axis
        }
        return ShardEntry(
            host=host,
            file=file,
            bytes=len(content),
            generation=self.seed,
            rows=len(ids),
            row_ids=tuple(ids),
            axes=axes,
            columns=spans,
            body=body,
            checksums=table,
            block_bytes=256,
            checksum="",
        )


def manifest(stage: str, shards: Sequence[ShardEntry]) -> Manifest:
    return Manifest(
        run="r", iteration=1, stage=stage, key="k", policy_version=1, shards=tuple(shards)
    )


def even_world(
    hosts: Sequence[str], rows_per_host: int, tokens: np.ndarray
) -> tuple[World, list[Manifest]]:
    """One rollout shard a host, with `tokens[host, row]` tokens."""
    world, shards = World(), []
    for number, host in enumerate(hosts):
        ids = range(number * rows_per_host, (number + 1) * rows_per_host)
        counts = {row: int(tokens[number, row % rows_per_host]) for row in ids}
        ones = dict.fromkeys(ids, 1)
        lengths = {"tokens": counts, "turn_starts": ones, "finish_reason": ones}
        shards.append(world.shard("rollout", host, ids, ROLLOUT, lengths))
    return world, [manifest("rollout", shards)]


@st.composite
def partitions(
    draw: st.DrawFn, world: World, stage: str, ids: list[int], columns: Any, lengths: Any
) -> Any:
    """Deal rows out to some shards on some hosts, empty ones among them."""
    shards = draw(st.integers(1, 5))
    of_row = [draw(st.integers(0, shards - 1)) for _ in ids]
    parts = [
        [row for row, shard in zip(ids, of_row, strict=True) if shard == k] for k in range(shards)
    ]
    entries = [
        world.shard(stage, draw(st.sampled_from(HOSTS)), part, columns, lengths) for part in parts
    ]
    return manifest(stage, entries)


@st.composite
def batches(draw: st.DrawFn) -> tuple[World, list[Manifest]]:
    """Joined stages; the last one may have fewer rows."""
    world = World()
    ids = draw(st.lists(st.integers(0, 10**9), unique=True, max_size=14))
    lengths = {
        axis: {row: draw(st.integers(0, most)) for row in ids}
        for axis, most in (("tokens", 40), ("turn_starts", 3), ("finish_reason", 5))
    }
    lengths["advantages"] = lengths["tokens"]
    kept = [row for row in ids if draw(st.booleans())] if draw(st.booleans()) else ids
    stages = [draw(partitions(world, "rollout", ids, ROLLOUT, lengths))]
    if draw(st.booleans()):
        stages.append(draw(partitions(world, "reward", ids, REWARD, lengths)))
    if draw(st.booleans()):
        stages.append(draw(partitions(world, "advantage", kept, ADVANTAGE, lengths)))
    return world, stages


@st.composite
def layouts(draw: st.DrawFn, columns: set[str]) -> Layout:
    """Any arrangement of up to 24 ranks."""
    data, each = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    chosen = draw(st.none() | st.sets(st.sampled_from(sorted(columns)), min_size=1))
    return Layout(
        data_parallel=data,
        ranks_per_replica=each,
        hosts=tuple(draw(st.sampled_from((*HOSTS, "elm"))) for _ in range(data * each)),
        columns=None if chosen is None else tuple(sorted(chosen)),
        linear=draw(st.sampled_from((0.0, 1.0))),
        quadratic=draw(st.sampled_from((0.0, 0.01))),
        keep_groups=draw(st.booleans()),
        max_imbalance=draw(st.sampled_from((0.0, 0.06, 1.0))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[World, list[Manifest], Layout, np.ndarray]:
    world, stages = draw(batches())
    names = set().union(*(stage.column_names() for stage in stages))
    groups = draw(st.lists(st.integers(0, 4), min_size=14, max_size=14))
    return world, stages, draw(layouts(names)), np.array(groups[: len(sample_ids(stages[-1]))])


def receive(world: World, plan: DispatchPlan, host: str) -> np.ndarray:
    """Run a host's reads into one buffer; every byte at most once, and none that lies here."""
    incoming, seen = incoming_of(plan, host), set()
    ends = incoming.place + incoming.length
    buffer = np.zeros(ends.max(initial=0), dtype=np.uint8)
    for shard, start, length, place in zip(
        incoming.shard, incoming.start, incoming.length, incoming.place, strict=True
    ):
        entry = plan.entries[shard]
        assert entry.host != host
        assert length > 0
        assert place % 8 == start % 8
        taken = {(entry.file, byte) for byte in range(start, start + length)}
        assert not taken & seen
        seen |= taken
        buffer[place : place + length] = world.files[entry.host, entry.file][start : start + length]
    needed = {
        (plan.entries[shard].file, byte)
        for rank, where in enumerate(plan.hosts)
        if where == host
        for column in plan.sources_of(rank).columns.values()
        for shard, start, length in zip(column.shard, column.start, column.length, strict=True)
        if plan.entries[shard].host != host
        for byte in range(start, start + length)
    }
    assert seen == needed
    whole = Traffic(plan).by_host[host]
    assert [part.tolist() for part in (whole.shard, whole.start, whole.length)] == [
        part.tolist() for part in (incoming.shard, incoming.start, incoming.length)
    ]
    return buffer


def delivered(
    world: World, plan: DispatchPlan, rank: int, buffer: np.ndarray
) -> dict[tuple[str, int], bytes]:
    """Every row that a rank gets, from local files and its host's receive buffer."""
    found, host = {}, plan.hosts[rank]
    for column, place in plan.sources_of(rank).columns.items():
        away = np.array([plan.entries[shard].host != host for shard in place.shard], dtype=bool)
        landed = np.zeros(len(away), dtype=np.int64)
        landed[away] = incoming_of(plan, host).find(
            place.shard[away], place.start[away], place.length[away]
        )
        for index, row in enumerate(plan.rows(rank).tolist()):
            entry = plan.entries[place.shard[index]]
            memory = buffer if away[index] else world.files[entry.host, entry.file]
            start = landed[index] if away[index] else place.start[index]
            found[column, row] = memory[start : start + place.length[index]].tobytes()
    return found

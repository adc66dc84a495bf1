"""Batches: rows of several stages and shards joined, as views that know their owner."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Batch, Manifest, ManifestError, ShardStore
from earl_core.dispatch.reads.sources import ColumnSource, Kind, Sources
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, REWARD_SCHEMA, SAMPLE_BITS
from tests.columns import list_column, write_columns
from tests.dispatch.episodes import episode, manifest_of, write


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", max_bytes=2**30)


episode_turns = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(episode_turns, min_size=1, max_size=8), st.data())
def test_a_batch_gives_back_what_was_written_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[list[tuple[int, int]]],
    data: st.DataObject,
) -> None:
    store = ShardStore(tmp_path_factory.getbasetemp() / "batches", 2**30)
    episodes = [episode(number, item, f"ü{number}") for number, item in enumerate(turns)]
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(episodes), max_size=len(episodes)))
    shards = [
        entry
        for rank in range(3)
        for entry in write(
            store, [e for e, owner in zip(episodes, owners, strict=True) if owner == rank], rank
        ).shards
    ]
    manifest = manifest_of(*shards).sealed()
    order = data.draw(st.permutations(range(len(episodes))))
    chosen = order[: data.draw(st.integers(0, len(order)))]
    rows = [number << SAMPLE_BITS for number in chosen]
    with Batch(store, [manifest], rows=rows, verify=True) as batch:
        assert batch.rows.tolist() == rows
        assert batch.scalars("episode_id").tolist() == chosen
        assert batch.strings("finish_reason") == [f"ü{number}" for number in chosen]
        for row, number in enumerate(chosen):
            sample = episodes[number].samples[0]
            assert batch.row("tokens", row).tolist() == sample.tokens
            assert batch.row("turn_starts", row).tolist() == sample.turn_starts
            logprobs = np.float32(sample.rollout_logprobs).tolist()
            assert batch.row("rollout_logprobs", row).tolist() == logprobs
        masks = [part.tolist() for part in batch.list_rows("loss_mask")]
        assert masks == [episodes[number].samples[0].loss_mask for number in chosen]
    for entry in shards:
        assert store.release(entry)


def advantages(store: ShardStore, ids: np.ndarray, lengths: list[int]) -> Manifest:
    columns = {
        "sample_id": ids,
        "advantages": list_column(
            [np.full(length, number) for number, length in enumerate(lengths)], "float32"
        ),
    }
    entry = write_columns(
        store, stage="advantage", iteration=4, rank=0, schema=ADVANTAGE_SCHEMA, columns=columns
    )
    return manifest_of(entry, stage="advantage").sealed()


def test_later_stage_with_fewer_rows_decides_and_columns_join_by_row(store: ShardStore) -> None:
    rollout = write(store, [episode(n, [(2, n + 1)]) for n in range(5)])
    kept = np.array([1, 3], dtype=np.int64) << SAMPLE_BITS
    later = advantages(store, kept, [4, 6])
    with Batch(store, [rollout, later]) as batch:
        assert batch.rows.tolist() == kept.tolist()
        assert [len(batch.row("tokens", row)) for row in range(2)] == [4, 6]
        assert batch.row("advantages", 1).tolist() == [1.0] * 6
        assert batch.scalars("episode_id").tolist() == [1, 3]
    with pytest.raises(ManifestError, match="lacks rows that a later stage has"):
        Batch(store, [later, rollout])


def test_a_subset_of_columns_opens_what_it_needs(store: ShardStore) -> None:
    rollout = write(store, [episode(n, [(2, 2)]) for n in range(2)])
    ids = np.array([0, 1 << SAMPLE_BITS], dtype=np.int64)
    later = advantages(store, ids, [4, 4])
    with Batch(store, [rollout, later], columns=["tokens", "turns"]) as batch:
        assert batch.names() == ["tokens", "turns"]
        # Its shard is not held, because none of its columns is wanted.
        assert store.release(later.shards[0])
        with pytest.raises(ValueError, match="no column 'advantages'"):
            batch.row("advantages", 0)
    with pytest.raises(ValueError, match=r"no manifest has the columns \['values'\]"):
        Batch(store, [rollout], columns=["tokens", "values"])


def test_shards_without_a_wanted_row_are_not_opened(store: ShardStore) -> None:
    here = write(store, [episode(0, [(1, 2)])])
    there = write(store, [episode(1, [(1, 2)])], rank=1)
    both = manifest_of(*here.shards, *there.shards).sealed()
    assert store.release(there.shards[0])
    with Batch(store, [both], rows=[0]) as batch:
        assert len(batch.row("tokens", 0)) == 3
    with pytest.raises(ManifestError, match="is gone"):
        Batch(store, [both])


def test_each_kind_of_column_has_its_own_way(store: ShardStore) -> None:
    with Batch(store, [write(store, [episode(0, [(2, 3)])])]) as batch:
        with pytest.raises(ValueError, match=r"scalar column; use scalars"):
            batch.row("turns", 0)
        with pytest.raises(ValueError, match=r"list column; use row"):
            batch.scalars("tokens")
        with pytest.raises(ValueError, match=r"string column; use"):
            batch.list_rows("finish_reason")
        with pytest.raises(ValueError, match=r"list column; use"):
            batch.strings("tokens")


@pytest.mark.parametrize("form", ["array", "tensor", "slice", "rows"])
def test_views_keep_the_batch_from_closing_and_the_shard_from_going(
    store: ShardStore, form: str
) -> None:
    manifest = write(store, [episode(0, [(2, 3)])])
    batch = Batch(store, [manifest])
    make = {
        "array": lambda: batch.row("tokens", 0),
        "tensor": lambda: torch.from_numpy(batch.row("tokens", 0)),
        "slice": lambda: batch.row("tokens", 0)[1:][::2].astype(np.int32, copy=False),
        "rows": lambda: batch.list_rows("tokens"),
    }
    view = make[form]()
    with pytest.raises(BufferError):
        batch.close()
    assert not store.release(manifest.shards[0])
    del view
    batch.close()
    assert store.release(manifest.shards[0])


def test_views_cannot_be_written(store: ShardStore) -> None:
    with Batch(store, [write(store, [episode(0, [(2, 3)])])]) as batch:
        view = batch.row("tokens", 0)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        del view


def test_an_error_inside_does_not_hide_behind_its_views(store: ShardStore) -> None:
    manifest = write(store, [episode(0, [(2, 3)])])

    def fail() -> None:
        with Batch(store, [manifest]) as batch:
            view = batch.row("tokens", 0)
            raise KeyError(int(view[0]))

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    assert store.release(manifest.shards[0])


def test_stale_views_show_poison(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    store.pool.poison = True
    manifest = write(store, [episode(0, [(2, 3)])])
    place = manifest.shards[0].columns["tokens"].values[0]
    path = store.path(manifest.shards[0])
    with path.open("rb") as stale:
        assert store.release(manifest.shards[0])
        stale.seek(place)
        assert stale.read(4) == b"\xa5" * 4


def test_a_batch_over_memory_brought_here_otherwise() -> None:
    closed = []

    class Lease:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    memories = {
        0: memoryview(np.arange(10, dtype=np.int32)).cast("B"),
        7: memoryview(np.arange(100, 110, dtype=np.int32)).cast("B"),
    }

    def column(kind: Kind, shard: list[int], elements: list[tuple[int, int]]) -> ColumnSource:
        first, last = np.array(elements, np.int64).T * 4
        return ColumnSource(kind, np.dtype("int32"), 0, np.array(shard), first, last - first)

    columns = {
        "tokens": column("list", [7, 0, 0], [(2, 4), (0, 3), (9, 9)]),
        "turns": column("scalar", [0, 7, 0], [(6, 7), (5, 6), (6, 7)]),
    }
    sources = Sources((), np.array([7, 8, 9]), np.zeros(3, np.int64), columns)
    with Batch.over(sources, memories, [Lease("a"), Lease("b")]) as batch:
        assert [row.tolist() for row in batch.list_rows("tokens")] == [[102, 103], [0, 1, 2], []]
        assert batch.scalars("turns").tolist() == [6, 105, 6]
        assert batch.rows.tolist() == [7, 8, 9]
    assert closed == ["b", "a"]


def test_columns_of_different_types_in_one_manifest_are_an_error(store: ShardStore) -> None:
    ids = np.array([0], np.int64)
    narrow = pa.schema([REWARD_SCHEMA.field(name) for name in ("sample_id", "reward")])
    one = write_columns(
        store,
        stage="x",
        iteration=0,
        rank=0,
        schema=narrow,
        columns={"sample_id": ids, "reward": np.zeros(1, np.float32)},
    )
    schema = narrow.set(1, narrow.field(1).with_type(pa.float64()))
    two = write_columns(
        store,
        stage="x",
        iteration=0,
        rank=1,
        schema=schema,
        columns={"sample_id": ids + 1, "reward": np.zeros(1)},
    )
    with pytest.raises(ManifestError, match="different types"):
        Batch(store, [manifest_of(one, two)])

"""Shards, manifests and batches through their public interfaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Batch, Manifest, ManifestError, ShardStore, StoreFull
from earl_core.dispatch.layout import Layout, assign_rows
from earl_core.dispatch.manifest import read_manifest, write_manifest
from earl_core.trajectory.samples import Episode, ListColumn, Sample, rollout_columns
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_BITS


def episode(number: int, turns: list[tuple[int, int]], seed: int = 0) -> Episode:
    """An episode with turns of (observation tokens, answer tokens)."""
    draw = np.random.default_rng((seed, number))
    sample = Sample()
    for observed, answered in turns:
        sample.begin_turn(draw.integers(0, 99, observed).tolist())
        sample.answer(draw.integers(0, 99, answered).tolist(), (-draw.random(answered)).tolist(), 3)
    sample.turn_rewards[-1] = float(number)
    return Episode(number, number // 2, number // 2, [sample], "done")


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", max_bytes=2**30)


def write(store: ShardStore, episodes: list[Episode], stage: str = "rollout") -> Manifest:
    entry = store.write(
        stage=stage,
        iteration=4,
        rank=0,
        schema=ROLLOUT_SCHEMA,
        columns=rollout_columns(episodes),
    )
    return Manifest(
        run="r", iteration=4, stage=stage, key="k", policy_version=4, shards=(entry,)
    ).sealed()


episode_turns = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(episode_turns, min_size=1, max_size=6))
def test_batch_gives_back_what_was_written_and_stock_pyarrow_reads_it(
    tmp_path_factory: pytest.TempPathFactory, turns: list[list[tuple[int, int]]]
) -> None:
    store = ShardStore(tmp_path_factory.mktemp("s"), 2**30)
    episodes = [episode(number, item) for number, item in enumerate(turns)]
    manifest = write(store, episodes)
    with Batch(store, [manifest], verify=True) as batch:
        for row, played in enumerate(episodes):
            sample = played.samples[0]
            assert batch.row("tokens", row).tolist() == sample.tokens
            assert batch.row("loss_mask", row).tolist() == sample.loss_mask
            assert batch.row("turn_starts", row).tolist() == sample.turn_starts
            assert np.array_equal(
                batch.row("rollout_logprobs", row), np.float32(sample.rollout_logprobs)
            )
        assert batch.scalars("episode_id").tolist() == list(range(len(episodes)))
    with pa.memory_map(str(store.path(manifest.shards[0]))) as source:
        table = pa.ipc.open_file(source).get_batch(0)
        table.validate(full=True)
        assert table.schema.remove_metadata() == ROLLOUT_SCHEMA
        assert table.column("tokens").to_pylist() == [e.samples[0].tokens for e in episodes]
        assert table.column("finish_reason").to_pylist() == ["done"] * len(episodes)


def test_later_stage_with_fewer_rows_decides_and_columns_join_by_row(store: ShardStore) -> None:
    rollout = write(store, [episode(n, [(2, n + 1)]) for n in range(5)])
    kept = np.array([1, 3], dtype=np.int64) << SAMPLE_BITS
    lengths = [4, 6]
    columns = {
        "sample_id": kept,
        "advantages": ListColumn.from_rows(
            [np.full(length, value) for length, value in zip(lengths, (0.5, -0.5), strict=True)],
            "float32",
        ),
    }
    entry = store.write(
        stage="advantage", iteration=4, rank=0, schema=ADVANTAGE_SCHEMA, columns=columns
    )
    later = Manifest(
        run="r", iteration=4, stage="advantage", key="k", policy_version=4, shards=(entry,)
    ).sealed()
    with Batch(store, [rollout, later]) as batch:
        assert batch.rows.tolist() == kept.tolist()
        assert [len(batch.row("tokens", row)) for row in range(2)] == lengths
        assert batch.row("advantages", 1).tolist() == [-0.5] * 6
        assert batch.scalars("episode_id").tolist() == [1, 3]


def test_rows_of_several_shards_are_found(store: ShardStore) -> None:
    first = write(store, [episode(n, [(1, 2)]) for n in (0, 3)])
    second = write(store, [episode(n, [(1, 3)]) for n in (1, 2)])
    both = first.model_copy(update={"shards": first.shards + second.shards}).sealed()
    with Batch(store, [both]) as batch:
        assert batch.scalars("episode_id").tolist() == [0, 1, 2, 3]
        assert [len(batch.row("tokens", row)) for row in range(4)] == [3, 4, 4, 3]


def test_equal_data_has_equal_digests_whenever_it_was_written(store: ShardStore) -> None:
    episodes = [episode(n, [(2, 3)]) for n in range(3)]
    one, two = write(store, episodes), write(store, episodes)
    assert one.shards[0].generation != two.shards[0].generation
    assert one.data_digest() == two.data_digest()
    assert one.digest != two.digest


def test_views_keep_the_batch_from_closing(store: ShardStore) -> None:
    batch = Batch(store, [write(store, [episode(0, [(2, 3)])])])
    view = batch.row("tokens", 0)
    with pytest.raises(BufferError):
        batch.close()
    del view
    batch.close()


def test_a_reader_keeps_a_shard_from_being_released(store: ShardStore) -> None:
    manifest = write(store, [episode(0, [(2, 3)])])
    with Batch(store, [manifest]):
        assert not store.release(manifest.shards[0])
    assert store.release(manifest.shards[0])
    assert store.used_bytes() == 0
    with pytest.raises(ManifestError, match="is gone"):
        Batch(store, [manifest])


def test_corrupt_and_cut_shards_are_found(store: ShardStore) -> None:
    manifest = write(store, [episode(n, [(20, 3)]) for n in range(4)])
    entry = manifest.shards[0]
    path = store.path(entry)
    start, _ = entry.columns["tokens"].values
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    store.verify(entry, checksum=False)
    with pytest.raises(ManifestError, match="corrupt"):
        store.verify(entry, checksum=True)
    with pytest.raises(ManifestError, match="corrupt"):
        Batch(store, [manifest], verify=True)
    path.write_bytes(data[:-8])
    with pytest.raises(ManifestError, match="bytes"):
        Batch(store, [manifest])


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
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "nothing.json")


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", ".hidden", "a/b.arrow"])
def test_a_manifest_cannot_name_a_file_outside_the_store(store: ShardStore, name: str) -> None:
    entry = write(store, [episode(0, [(2, 3)])]).shards[0]
    with pytest.raises(ValueError, match="file"):
        type(entry).model_validate({**entry.model_dump(), "file": name})


def test_full_store_names_what_holds_it(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, max_bytes=4000)
    episodes = [episode(0, [(50, 50)])]
    write(store, episodes)
    while store.used_bytes() < 2000:
        write(store, episodes)
    with pytest.raises(StoreFull, match=r"do not fit.*000004-rollout-0"):
        write(store, [episode(0, [(500, 50)])])
    assert not list(tmp_path.glob(".writing*"))


def test_unsealed_files_of_dead_writers_are_swept(store: ShardStore) -> None:
    script = (
        "import sys, pathlib, time\n"
        "from earl_core.process import ProcessId\n"
        "pathlib.Path(sys.argv[1], f'.writing.{ProcessId.current()}.7').write_bytes(b'x')\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    store.prepare()
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(store.directory)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert store.sweep_unsealed() == 0
    child.kill()
    child.wait()
    time.sleep(0.05)
    assert store.sweep_unsealed() == 1
    assert os.listdir(store.directory) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 5),
)
def test_rows_are_dealt_out_once_with_groups_together(
    rows: list[tuple[int, int]], ranks: int
) -> None:
    lengths, groups = zip(*rows, strict=True)
    parts = assign_rows(lengths, groups, Layout(ranks, 1.0, 0.001))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    owners: dict[int, set[int]] = {}
    for rank, part in enumerate(parts):
        for row in part:
            owners.setdefault(groups[row], set()).add(rank)
    assert all(len(owner) == 1 for owner in owners.values())

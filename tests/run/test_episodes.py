"""Kept episodes: equal to their shards, bounded, whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earl_core.dispatch import ManifestError
from earl_core.run import RunDirectory
from earl_core.run.episodes import (
    SCHEMA,
    EpisodeKeeper,
    EpisodesDamaged,
    read_samples,
    remove_oldest,
    write_episodes,
)
from earl_core.run.kept_episodes import read_episodes
from earl_core.secrets.rules import Redaction
from earl_core.trajectory.samples import OPPONENT_ROLE, Sample, VersionSpan
from tasks.reports.run_page.stored_episodes import PackedEpisodes, pack_episodes
from tests.kept import game, seal_episodes
from tests.run.test_run_directory import config_in


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(config_in(tmp_path))


def test_all_that_was_played_is_kept(run: RunDirectory) -> None:
    shards = [[game(0), game(1, "loss", samples=2)], [game(2, "\ud800 draw")]]
    path = run.episodes_path(3)
    write_episodes(path, run.stores, *seal_episodes(run, 3, shards))
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    rows = table.to_pylist()
    assert [row["episode_id"] for row in rows] == [0, 1, 1, 2]
    assert [row["sample_id"] for row in rows] == [0, 1 << 16, 1 << 16 | 1, 2 << 16]
    assert [row["outcome"] for row in rows] == ["win", "loss", "loss", "? draw"]
    assert [row["reward"] for row in rows] == [1.0] * 4
    samples = [sample for shard in shards for episode in shard for sample in episode.samples]
    for row, sample in zip(rows, samples, strict=True):
        for name in ("tokens", "loss_mask", "rollout_logprobs", "turn_rewards", "texts"):
            assert row[name] == getattr(sample, name)
    assert path.stat().st_mode & 0o777 == 0o600
    # The shards are nobody's any more.
    for entry in run.manifest(3, "rollout").shards:
        assert run.store.release(entry)

    found = read_episodes(path, None, 2)
    assert [episode["episode_id"] for episode in found] == [0, 1]
    for episode in found:
        told = ("observation", "answer", "reward", "tokens")
        assert [tuple(turn[name] for name in told) for turn in episode["turns"]] == [
            ("board 1", "[5]", 0.0, 3),
            ("board 2", "[9]", 1.0, 4),
        ]
        assert all(turn["logprob"] < 0 < turn["context"] for turn in episode["turns"])
        assert episode["closing"] == "you won"
    assert read_episodes(run.episodes_path(4), None, 2) == []
    with pytest.raises(ManifestError, match="gone"):
        write_episodes(run.episodes_path(4), run.stores, *(run.manifest(3, s) for s in STAGES))
    assert not run.episodes_path(4).exists()


def shown_in(path: Path) -> tuple[list[dict[str, Any]], PackedEpisodes]:
    """What readers make of a file, and the report of it, without its iteration."""
    packed = pack_episodes([path], None, 10, 10**6, Redaction())
    del packed.index["iteration"]
    return read_episodes(path, None), packed


def test_an_opponent_that_is_trained_is_kept_and_shown_as_nobodys_answers(
    run: RunDirectory,
) -> None:
    path = run.episodes_path(3)
    write_episodes(path, run.stores, *seal_episodes(run, 3, [[game(7), game(8)]]))
    alone = shown_in(path)
    both = [game(7), game(8)]
    for episode in both:
        rival = Sample(role=OPPONENT_ROLE)
        rival.begin_turn([1, 2], "its board")
        rival.answer([4], [-0.5], [VersionSpan(0, 0, 1)], "its move")
        rival.turn_rewards[-1] = -1.0
        episode.samples.append(rival)
    path = run.episodes_path(4)
    write_episodes(path, run.stores, *seal_episodes(run, 4, [both]))
    assert read_samples(path).num_rows == 4
    assert shown_in(path) == alone


def test_episodes_dealt_in_any_order_are_kept_in_theirs(run: RunDirectory) -> None:
    path = run.episodes_path(0)
    shards = [[game(0), game(3, samples=2)], [], [game(1), game(4)], [game(2)]]
    made = seal_episodes(run, 0, shards)
    write_episodes(path, run.stores, *made)
    table = pq.read_table(path)
    assert table["episode_id"].to_pylist() == [0, 1, 2, 3, 3, 4]
    assert table["tokens"][3].as_py() == shards[0][1].samples[0].tokens
    write_episodes(path, run.stores, *made, most=3)
    assert pq.read_table(path)["episode_id"].to_pylist() == [0, 1, 2]


STAGES = ("rollout", "reward")


def test_only_what_the_data_has_changed_is_written_anew(run: RunDirectory) -> None:
    path = run.episodes_path(0)
    first = seal_episodes(run, 0, [[game(0), game(1), game(2)]])
    write_episodes(path, run.stores, *first)
    written = path.stat().st_mtime_ns
    write_episodes(path, run.stores, *first)
    assert path.stat().st_mtime_ns == written
    write_episodes(path, run.stores, *first, most=2)
    assert pq.read_table(path)["episode_id"].to_pylist() == [0, 1]
    write_episodes(path, run.stores, *seal_episodes(run, 0, [[game(7)]]))
    assert pq.read_table(path)["episode_id"].to_pylist() == [7]


def test_the_oldest_go_when_they_are_too_many(run: RunDirectory) -> None:
    for iteration in range(4):
        made = seal_episodes(run, iteration, [[game(n) for n in range(4)]])
        write_episodes(run.episodes_path(iteration), run.stores, *made)
    size = run.episodes_path(0).stat().st_size
    remove_oldest(run.path, 5 * size // 2)
    assert [run.episodes_path(k).exists() for k in range(4)] == [False, False, True, True]
    remove_oldest(run.path, 0)
    assert not list(run.path.rglob("episodes.parquet"))


@pytest.mark.parametrize("kept", ["all", 2, "none"])
def test_as_many_are_kept_as_asked_for(tmp_path: Path, kept: str | int) -> None:
    run = RunDirectory.open(config_in(tmp_path, tracking={"keep_episodes": kept}))
    keeper = EpisodeKeeper(run)
    keeper.begin(*seal_episodes(run, 0, [[game(n) for n in range(3)]]))
    keeper.settle()
    found = read_episodes(run.episodes_path(0), None, 9)
    assert [episode["episode_id"] for episode in found] == list(range(3))[
        : {"all": 3, 2: 2}.get(kept, 0)
    ]
    assert run.episodes_path(0).exists() == (kept != "none")


def test_episodes_that_cannot_be_kept_cost_a_warning(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    made = seal_episodes(run, 0, [[game(0)]])
    run.episodes_path(0).mkdir()
    keeper = EpisodeKeeper(run)
    keeper.begin(*made)
    keeper.settle()
    (warning,) = caplog.records
    assert "the episodes of iteration 0 were not kept" in warning.getMessage()
    assert "not kept" in run.ledger()[-1]["event"]
    with pytest.raises(EpisodesDamaged):
        read_episodes(run.episodes_path(0), None, 1)


def test_iterations_that_overlap_keep_theirs_at_the_same_time(run: RunDirectory) -> None:
    """Each in a thread of its own, whose turns come anywhere."""
    made = seal_episodes(run, 0, [[game(0)]])
    keeper = EpisodeKeeper(run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(keeper.begin, *made) for _ in range(200)]:
                done.result(60)
    finally:
        sys.setswitchinterval(interval)
    keeper.settle()
    assert run.episodes_path(0).exists()


@pytest.mark.parametrize("damage", ["bytes", "cut", "link", "fifo", "text"])
def test_damaged_files_are_refused_and_never_waited_for(run: RunDirectory, damage: str) -> None:
    path = run.episodes_path(0)
    write_episodes(path, run.stores, *seal_episodes(run, 0, [[game(n) for n in range(50)]]))
    data, group = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0)
    path.unlink()
    if damage == "bytes":
        columns = [group.column(number) for number in range(group.num_columns)]
        (shown,) = [c for c in columns if c.path_in_schema.startswith("turn_rewards")]
        at = shown.data_page_offset + shown.total_compressed_size // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "text":
        path.write_text("PAR1")
    elif damage == "fifo":
        os.mkfifo(path)
    else:
        (run.path / "elsewhere").write_bytes(data)
        path.symlink_to(run.path / "elsewhere")
    with pytest.raises(EpisodesDamaged, match="is damaged"):
        read_episodes(path, None, 50)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import earl_core.run.episodes as episodes
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import OPPONENT_ROLE, Sample, VersionSpan
from tasks.reports.run_page.stored_episodes import pack_episodes
from tests.kept import game, seal_episodes
from tests.run.test_run_directory import config_in

run = RunDirectory.open(config_in(Path(sys.argv[1])))
made = seal_episodes(run, 0, [[game(n)] for n in range(4)])
read, shards = run.stores.table, []

def table(entry, scratch):
    shards.append(entry)
    if len(shards) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(entry, scratch)

run.stores.table = table
episodes.write_episodes(run.episodes_path(0), run.stores, *made)
"""


def test_what_a_kill_leaves_half_written_is_not_read(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    killed = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert killed.returncode == -9
    folder = tmp_path / "runs" / "a" / "iterations" / "000000"
    assert list(folder.glob(".episodes.parquet.*.tmp"))
    run = RunDirectory.open(config_in(tmp_path))
    assert read_episodes(run.episodes_path(0), None, 9) == []
    assert not list(folder.glob(".*.tmp"))
    write_episodes(run.episodes_path(0), run.stores, *(run.manifest(0, s) for s in STAGES))
    assert len(read_episodes(run.episodes_path(0), None, 9)) == 4

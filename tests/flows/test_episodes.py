"""The episodes of a real run are kept before their shards go."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from earl_core.dispatch import read_manifest
from tests.flows.runs import Runs


def shards_of(runs: Runs, iteration: int, stage: str) -> list[dict[str, Any]]:
    manifest = read_manifest(runs.run() / "iterations" / f"{iteration:06d}" / f"{stage}.json")
    rows: list[dict[str, Any]] = []
    for entry in manifest.shards:
        (path,) = (runs.directory / "shm").rglob(entry.file)
        with pa.memory_map(str(path)) as source:
            rows += pa.ipc.open_file(source).read_all().to_pylist()
    return rows


def test_what_is_kept_is_what_was_played(runs: Runs) -> None:
    def kept(iteration: int) -> Any:
        return runs.run() / "iterations" / f"{iteration:06d}" / "episodes.parquet"

    three = "iterations=3"
    (ending,) = runs.train_here({"overrides": [three], "fault": "stable.before@0=raise"})
    assert ending == "RuntimeError: injected failure at stable.before@0"
    rows = pq.read_table(kept(0)).to_pylist()
    played, rewards = shards_of(runs, 0, "rollout"), shards_of(runs, 0, "reward")
    assert len(rows) == len(played) == 16
    for row, sample, reward in zip(rows, played, rewards, strict=True):
        assert reward == {
            "sample_id": row["sample_id"],
            "reward": row.pop("reward"),
            "scores": row.pop("scores"),
            "turn_totals": row.pop("turn_totals"),
        }
        texts = row.pop("texts")
        assert len(texts) == 2 * row["turns"] + 1
        assert all(texts[::2])
        assert row == {name: value for name, value in sample.items() if name != "texts"}
    outcomes = {row["outcome"] for row in rows}
    assert outcomes <= {"win", "draw", "loss", "illegal"}

    few = [three, "tracking.keep_episodes=3"]
    endings = runs.train_here(
        {"overrides": few, "fault": "stable.after@1=raise", "lose_memory": True},
        {"overrides": [three, "tracking.keep_episodes=none"]},
    )
    assert endings == ["RuntimeError: injected failure at stable.after@1", None]
    assert pq.read_table(kept(1))["episode_id"].to_pylist() == [16, 17, 18]
    assert not kept(2).exists()
    assert runs.shared_memory() == []
    # What an earlier attempt kept is nothing that a later one removes.
    assert kept(0).exists()

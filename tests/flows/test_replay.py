"""Groups that are trained again: each is played, scored and counted once, kills or not."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earl_core.config import load_config
from flows.debug import Debugged, opened_here
from tests.flows.runs import KILLED, Runs
from tests.flows.test_stream import BATCH, SIZE, assert_once_and_young, stream

ITERATIONS = 4


def replaying(share: float | None, max_age: int = 2) -> tuple[str, ...]:
    """Overrides of a run that trains groups again; share None: it does not."""
    again = "" if share is None else f", replay: {{share: {share}, max_age: {max_age}}}"
    return (
        *stream(1, ITERATIONS),
        f"schedule={{staleness: 1, mode: stream{again}}}",
    )


def scored(seen: Path) -> tuple[str, ...]:
    """Overrides by which a function scores each episode and notes its number, and nobody else asks
    it."""
    function = {
        "function": "tests.experience.scoring_functions:turns",
        "weight": 0.01,
        "options": {"seen": str(seen)},
    }
    return "guard=off", f"reward.functions={json.dumps([function])}"


def trained(run: Path, iteration: int) -> list[int]:
    """The groups whose rows the sealed batch names, each whole; ascending."""
    sealed = json.loads((run / f"iterations/{iteration:06d}/collect.json").read_text())
    rows = [row for shard in sealed["shards"] for row in shard["row_ids"]]
    episodes = Counter(row >> 16 for row in rows)
    assert set(episodes.values()) == {1}
    groups = Counter(episode // SIZE for episode in episodes)
    assert set(groups.values()) == {SIZE}
    return sorted(groups)


def own(iteration: int) -> list[int]:
    return list(range(iteration * BATCH, (iteration + 1) * BATCH))


def played(run: Path) -> list[int]:
    """The groups by the lines of the journal that say that one was played."""
    lines = (run / "groups.jsonl").read_bytes().splitlines()
    told = [json.loads(line[line.index(b"{") :]) for line in lines]
    return sorted(line["group"] for line in told if line["tally"] is not None)


def iterations(runs: Runs, *overrides: str) -> Iterator[int]:
    """Train in this process; the number of each iteration that has ended."""
    config = load_config(str(runs.config), list(overrides))
    with opened_here(config, lambda *_: None) as controller:
        while (number := controller.next_iteration()) < config.iterations:
            Debugged(controller, number).whole()
            yield number
        controller.run.finish()


def batches_in_memory(runs: Runs) -> set[int]:
    """The batches that have shards of groups in shared memory."""
    names = (path.name for path in runs.shared_memory() if "-collect-" in path.name)
    return {int(name.partition("-")[0]) for name in names}


def test_groups_that_are_trained_again_are_counted_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped after the seal of a batch, and goes on with another share: the batch is
    collected again, and nothing is played again."""
    seen = runs.directory / "seen.txt"
    monkeypatch.setenv("EARL_FAULT", "collect.after@2=raise")
    with pytest.raises(Exception, match=r"collect\.after"):
        list(iterations(runs, *replaying(0.5), *scored(seen)))
    monkeypatch.delenv("EARL_FAULT")
    assert batches_in_memory(runs) >= {0, 1, 2}
    assert trained(runs.run(), 0) == own(0)
    assert trained(runs.run(), 1) == [*own(0), *own(1)]
    assert trained(runs.run(), 2) == [*own(1), *own(2)]
    for number in iterations(runs, *replaying(0.25), *scored(seen)):
        kept = batches_in_memory(runs)
        # Of later ones what the engines have ended already.
        assert min(kept, default=number) >= number - 1
    assert trained(runs.run(), 2) == [own(1)[-1], *own(2)]
    assert trained(runs.run(), 3) == [own(2)[-1], *own(3)]
    told = [line["event"] for line in runs.ledger() if "collected again" in line["event"]]
    assert told == ["collected again: schedule.replay has changed"]
    runs.assert_learnt()
    assert_once_and_young(runs.run(), 1, ITERATIONS)
    assert played(runs.run()) == list(range(ITERATIONS * BATCH))
    # Nobody is asked twice for the score of an episode.
    numbers = Counter(map(int, seen.read_text().split()))
    assert numbers == dict.fromkeys(range(ITERATIONS * BATCH * SIZE), 1)
    for number, line in enumerate(runs.metrics()):
        rows = pq.read_table(runs.run() / f"iterations/{number:06d}/episodes.parquet").to_pylist()
        mean = sum(row["reward"] for row in rows) / len(rows)
        assert line["reward/mean"] == pytest.approx(mean, abs=1e-6)
        turns = sum(row["turns"] for row in rows) / len(rows)
        assert line["reward/of/turns/mean"] == pytest.approx(turns / 10)
        assert line["rollout/episodes"] == BATCH * SIZE
        assert line["rollout/groups_replayed"] == (0, BATCH, 1, 1)[number]
        assert line["advantage/groups_dropped"] == line["advantage/episodes_failed"] == 0
        trained_on = SIZE * (BATCH + line["rollout/groups_replayed"])
        assert line["advantage/episodes_kept"] == trained_on
        assert line["rollout/groups_anew"] == 0
    assert runs.shared_memory() == []


def sealed_shards(run: Path, iteration: int) -> Any:
    return json.loads((run / f"iterations/{iteration:06d}/collect.json").read_text())["shards"]


@pytest.mark.slow
def test_after_a_kill_between_seal_and_update_the_batch_is_the_same(runs: Runs) -> None:
    """Without shared memory after another kill the groups that it held are not trained again."""
    asked = (*replaying(0.5), "stages.placement=shared", "checkpoint.every=2")
    runs.train(*asked, fault="collect.after@2=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    before = sealed_shards(runs.run(), 2)
    runs.train(*asked, fault="update.before@3=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    assert sealed_shards(runs.run(), 2) == before
    assert (2, "collect") in runs.executed("reused")
    assert trained(runs.run(), 2) == [*own(1), *own(2)]
    assert trained(runs.run(), 3) == [*own(2), *own(3)]
    shutil.rmtree(runs.directory / "shm")
    runs.train(*asked)
    assert_once_and_young(runs.run(), 1, ITERATIONS)
    assert trained(runs.run(), 3)[-BATCH:] == own(3)
    runs.assert_learnt()
    assert runs.shared_memory() == []

"""Updates of a stream that trains groups again, a second time in float64: which groups, and what
they weigh, by the rows that the run has kept of each group's own iteration. Some are an agent's,
whose conversations have roles."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from earl_core.config import RunConfig
from flows.debug import Debugged, opened_here
from tests.conformance.reference import Reference, Row, load
from tests.conformance.test_stream import sampled_by
from tests.conformance.test_whole_iterations import (
    FAMILIES,
    TEMPERATURE,
    UPDATE,
    configured,
    learnt,
    save,
    weights,
)

PROMPTS, STALENESS, SHARE, AGE = 2, 2, 0.6, 3
STOPPED = 2
ALGORITHM = {
    "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    "advantage": {"name": "rloo"}, "aggregation": {"name": "token_mean"},
    "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.2},
    "importance_correction": {"cap": 1.02},
}  # fmt: skip

ENVIRONMENTS = [
    {"name": "tests.conformance.letters:Letters", "label": "letters"},
    {"agent": "tests.rollout.agents:pair", "label": "pair"},
]
ROLES = {"letters": {""}, "pair": {"planner", "solver"}}


def apart(rows: list[Row]) -> list[Row]:
    """Each role's part of an episode as an episode of its own, which is compared with the same
    role's; what an episode's roles share comes with the last answer of each."""
    found: list[Row] = []
    for number, role in sorted({(row["episode_id"], row["role"]) for row in rows}):
        part = [row for row in rows if (row["episode_id"], row["role"]) == (number, role)]
        last = max(part, key=lambda row: max(row["turn_numbers"]))
        for row in part:
            rewards = [*row["turn_rewards"]]
            if row is last:
                rewards[-1] += row["shared_reward"]
            own = {"episode_id": (number, role), "group_id": (row["group_id"], role)}
            found.append({**row, **own, "turn_rewards": rewards})
    return found


def ages(rows: list[Row], iteration: int) -> set[int]:
    """Of the sampled tokens."""
    return {iteration - each for row in rows for each in row["token_versions"] if each >= 0}


def again(kept: dict[int, list[Row]], iteration: int) -> list[int]:
    """The groups that an iteration is to train again: the newest that are not too old, at most so
    many that they are the share of the batch. kept: rows of each group of earlier iterations."""
    young = [group for group in kept if max(ages(kept[group], iteration)) <= AGE]
    most = max(n for n in range(9) if n <= SHARE * (n + PROMPTS))
    return sorted(young, reverse=True)[:most]


def trained(run: Path, iteration: int) -> list[int]:
    """The groups whose rows the seal of `collect` names, in order of their rows."""
    sealed = json.loads((run / f"iterations/{iteration:06d}/collect.json").read_text())
    rows = sorted(row for shard in sealed["shards"] for row in shard["row_ids"])
    assert len(set(rows)) == len(rows)
    return list(dict.fromkeys((row >> 16) // 3 for row in rows))


def assert_told(batch: dict[str, float], oldest: list[int]) -> None:
    """The metrics of a batch. oldest: the greatest age of each group that is trained again."""
    assert batch["replayed_share"] == len(oldest) / (len(oldest) + PROMPTS) <= SHARE
    assert batch.get("replayed_age_max", 0) == max(oldest, default=0)
    assert batch.get("replayed_age_mean", 0) == (np.mean(oldest) if oldest else 0)
    assert batch["episodes"] == 3 * PROMPTS
    assert batch["episodes_replayed"] == 3 * len(oldest)


def replaying(model: Path, directory: Path) -> RunConfig:
    config = configured(model, ALGORITHM, directory, 4)
    config["rollout"] |= {"max_tokens_per_turn": 24, "stop": list("aeiou012")}
    config["environments"] = ENVIRONMENTS
    del config["environment"]
    replay = {"share": SHARE, "max_age": AGE}
    config["schedule"] = {"staleness": STALENESS, "mode": "stream", "replay": replay}
    return RunConfig.model_validate(config)


def test_updates_that_train_groups_again_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the seal of a batch and its update the run is stopped: the batch stays as it is."""
    monkeypatch.setenv("EARL_CLOCK", "0")
    model = save("Llama", FAMILIES["Llama"][0], tmp_path / "model")
    settings, run = replaying(model, tmp_path), tmp_path / "runs/run"
    reference, versions = Reference(model, ALGORITHM, UPDATE), {0: load(model)}
    kept: dict[int, list[Row]] = {}
    seen: list[tuple[int, int, set[int]]] = []
    labels: Counter[str] = Counter()

    def iterate(controller: Any, number: int) -> None:
        expected = again(kept, number)
        metrics = Debugged(controller, number).whole()
        own = pq.read_table(controller.run.episodes_path(number)).to_pylist()
        for row in own:
            assert row["role"] in ROLES[row["environment"]]
        labels.update(row["environment"] for row in own)
        # Those that are trained again are no new episodes.
        assert {row["group_id"] for row in own} == {2 * number, 2 * number + 1}
        assert trained(run, number) == [*sorted(expected), 2 * number, 2 * number + 1]
        rows = own + [row for group in expected for row in kept[group]]
        assert max(sampled_by(row, versions) for row in own) < 1e-4
        assert max(ages(own, number)) <= STALENESS
        before = weights(reference.model)
        found = reference.iteration(apart(rows), TEMPERATURE)
        ours, theirs = learnt(tmp_path, number), weights(reference.model)
        update, batch = metrics["update"].metrics, metrics["collect"].metrics
        assert update["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
        assert found["grad_norm"] > 0.05
        assert max(float(np.abs(theirs[n] - before[n]).max()) for n in theirs) > 1e-3
        assert max(float(np.abs(ours[n] - theirs[n]).max()) for n in theirs) < 1e-6
        assert update["age_max"] == max(ages(rows, number))
        assert_told(batch, [max(ages(kept[group], number)) for group in expected])
        # The correction weighs what is old.
        assert not expected or found["mismatch"] > 0.03
        seen.append((number, len(expected), ages(rows, number)))
        for group in (2 * number, 2 * number + 1):
            kept[group] = [row for row in own if row["group_id"] == group]
        versions[number + 1] = load(run / f"checkpoints/{number:06d}/policy")

    with opened_here(settings, lambda *_: None) as controller:
        for number in range(STOPPED):
            iterate(controller, number)
        monkeypatch.setenv("EARL_FAULT", f"update.before@{STOPPED}=raise")
        with pytest.raises(Exception, match=r"update\.before"):
            Debugged(controller, STOPPED).whole()
        monkeypatch.delenv("EARL_FAULT")
    sealed = (run / f"iterations/{STOPPED:06d}/collect.json").read_bytes()
    with opened_here(settings, lambda *_: None) as controller:
        for number in range(STOPPED, 4):
            iterate(controller, number)
        controller.run.finish()
    assert (run / f"iterations/{STOPPED:06d}/collect.json").read_bytes() == sealed
    assert [each[1] for each in seen][:2] == [0, 2]
    assert labels.keys() == ROLES.keys()
    assert max(max(each[2]) for each in seen) > STALENESS
    assert list((tmp_path / "shm").rglob("*.arrow")) == []

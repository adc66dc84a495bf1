"""Overlapping iterations, killed at every fault point of two of them, and each scheduled by itself:
their bits are those of iterations in turn that nothing happened to."""

from __future__ import annotations

import json
import os

import pytest

from tests.flows.runs import KILLED, STAGES, Runs
from tests.flows.test_mixture import GAME, PERFECT

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(3600)]

ITERATIONS, KILLED_IN = 5, (2, 3)
WORKERS_POINTS = (
    "rollout.sealed0",
    "reward.written",
    "reference.written",
    "advantage.written",
    "update.step0",
    "update.applied",
)
MOMENTS = (
    *(f"{stage}.{place}" for stage in STAGES for place in ("before", "seal", "after")),
    *("stable.before", "stable.after", "evaluation.before", "evaluation.seal"),
    *WORKERS_POINTS,
)


def asked(staleness: int, engines: int, ranks: int) -> tuple[str, ...]:
    """Overrides of a run that draws from a mixture by a curriculum, and is evaluated."""
    games = [{**GAME, "label": "weak", "weight": 2}, {**PERFECT, "label": "strong"}]
    return (
        f"iterations={ITERATIONS}",
        f"schedule.staleness={staleness}",
        f"stages.rollout.replicas={engines}",
        f"stages.update.replicas={ranks}",
        "environment=null",
        f"environments={json.dumps(games)}",
        "curriculum={memory: 0.5}",
        "algorithm.importance_correction={}",
        "rollout.prompts_per_iteration=8",
        "evaluation.every=1",
        "evaluation.episodes=8",
        "deadlines.repeats=9",
        f"checkpoint.keep_last={ITERATIONS}",
    )


@pytest.mark.parametrize(
    ("staleness", "engines", "ranks"), [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)]
)
def test_each_moment_of_two_iterations_is_survived_with_equal_bits(
    runs: Runs, staleness: int, engines: int, ranks: int
) -> None:
    overrides = asked(staleness, engines, ranks)
    runs.train(*overrides, "name=whole")
    runs.train(*overrides, "name=other", "seed=1")
    runs.assert_learnt("whole", than="other")
    once = runs.directory / "once"
    once.mkdir()
    runs.environment["EARL_FAULT_ONCE"] = str(once)
    fault = ";".join(f"{moment}@{k}=kill" for k in KILLED_IN for moment in MOMENTS)
    for _ in range(len(KILLED_IN) * len(MOMENTS) + 1):
        process = runs.start(*overrides, "stages.placement=shared", fault=fault)
        process.wait(300)
        runs.wait_for_workers_to_end()
        if process.returncode == 0:
            break
        assert process.returncode == KILLED, runs.output_path(len(runs.started) - 1).read_text()
    print(f"killed at {len(os.listdir(once))} of {len(KILLED_IN) * len(MOMENTS)} moments")
    missed = {f"{m}@{k}" for k in KILLED_IN for m in MOMENTS} - {*os.listdir(once)}
    assert not missed
    assert weights(runs, "run") == weights(runs, "whole")
    assert runs.shared_memory() == []


@pytest.mark.parametrize("staleness", [1, 2])
def test_iterations_that_are_scheduled_by_themselves_have_equal_bits(
    runs: Runs, staleness: int
) -> None:
    """As flow runs of their own, without shared memory between two of them."""
    overrides = asked(staleness, 1, 1)
    alone = {"alone": "run", "lose_memory": True}
    begun, *endings = runs.train_here(
        {"overrides": overrides, "fault": "select.before@0=raise"},
        *[alone] * ITERATIONS,
        {"overrides": [*overrides, "name=whole"]},
    )
    assert "injected failure" in str(begun)
    assert endings == [None] * (ITERATIONS + 1)
    runs.assert_learnt()
    assert weights(runs, "run") == weights(runs, "whole")
    lines = {line["iteration"]: line for line in runs.metrics()}
    assert [lines[k]["update/age_max"] for k in range(ITERATIONS)] == [
        min(k, staleness) for k in range(ITERATIONS)
    ]


def weights(runs: Runs, name: str) -> list[str]:
    """The digests of the published weights."""
    return [runs.weights(k, name) for k in range(ITERATIONS)]

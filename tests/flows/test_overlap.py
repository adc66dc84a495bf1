"""Stale rollouts: side by side with updates, one after another and killed, with equal bits."""

from __future__ import annotations

from collections.abc import Callable

from tests.flows.runs import KILLED, Runs

Undisturbed = Callable[..., Runs]

STALE = (
    "iterations=4",
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
    "evaluation.every=2",
    "evaluation.episodes=8",
)
SIDE_BY_SIDE = (*STALE, "stages.placement=shared")


def intervals(runs: Runs, stage: str) -> dict[int, tuple[float, float]]:
    """Start and seal of a stage by iteration, in seconds."""
    times: dict[tuple[int, str], float] = {
        (line["iteration"], line["event"]): line["time"]
        for line in runs.ledger()
        if line["stage"] == stage
    }
    return {
        iteration: (times[iteration, "started"], seconds)
        for (iteration, event), seconds in times.items()
        if event == "sealed"
    }


def assert_probed(runs: Runs) -> None:
    """Engines have proved that they hold the version of each update that a rollout plays."""
    for line in runs.metrics():
        asked = line["iteration"] > 1
        assert ("rollout/probe_mismatch_max" in line) == asked
        assert line.get("rollout/probe_mismatch_max", 0.0) < 1e-3
        assert line.get("rollout/probe_other_share", 0.0) < 0.1


def test_iterations_side_by_side_have_the_bits_of_iterations_in_turn(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    in_turn = undisturbed(*STALE)
    runs.train(*SIDE_BY_SIDE, fault="update.step0@1=linger")
    runs.assert_learnt()
    assert [runs.weights(k) for k in range(4)] == [in_turn.weights(k) for k in range(4)]
    assert_probed(runs)
    evaluated = [k for k, stage in runs.executed("sealed") if stage == "evaluation"]
    assert evaluated == [0, 2, 4]
    rollouts, updates = intervals(runs, "rollout"), intervals(runs, "update")
    # The others are shorter than what Prefect takes to begin a flow run.
    assert updates[1][0] < rollouts[2][0] < rollouts[2][1] < updates[1][1], (rollouts, updates)
    assert runs.shared_memory() == []


def test_killed_and_resumed_has_equal_bits(runs: Runs, undisturbed: Undisturbed) -> None:
    """In the end without shared memory, two iterations before the last one."""
    for moment in ("rollout.seal@1", "update.seal@1", "stable.after@1"):
        runs.train(*SIDE_BY_SIDE, fault=f"{moment}=kill", expect=KILLED)
        runs.wait_for_workers_to_end()
    for path in runs.shared_memory():
        path.unlink()
    runs.train(*SIDE_BY_SIDE)
    assert runs.weights(3) == undisturbed(*STALE).weights(3)
    assert_probed(runs)
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()

"""Killed runs continue: nothing finished is repeated, no update is applied twice, equal bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from earl_core.dispatch.shards.manifest import sealed_path
from tests.flows.runs import KILLED, STAGES, Runs

Undisturbed = Callable[..., Runs]

MOMENTS = [
    "select.before",
    "select.seal",
    "rollout.seal",
    "rollout.after",
    "reward.seal",
    "reference.seal",
    "advantage.seal",
    "update.seal",
    "update.after",
    "publish.seal",
    "publish.after",
]
"""Each stage's seal, and each place between stages where something else is there than at a seal."""


SOME_MOMENTS = ["reference.seal", "publish.after"]
"""Kills at the seals of rollout and update are in the fast tests."""

ONCE = "deadlines.repeats=0"
"""A lost rank ends the process, so that the next one has to go on."""


def assert_as_undisturbed(runs: Runs, undisturbed: Undisturbed, beside: str | None = None) -> None:
    """Two iterations, each stage sealed once, equal weights, and nothing left.

    beside: a stage that a kill may have met between its seal and the ledger's line.
    """
    sealed = runs.executed("sealed")
    for iteration in range(2):
        for stage in STAGES:
            if stage == beside and (iteration, stage) not in sealed:
                assert sealed_path(runs.run(), iteration, stage).exists()
                continue
            assert sealed.count((iteration, stage)) == 1, (iteration, stage, sealed)
        assert runs.weights(iteration) == undisturbed().weights(iteration)
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


def test_killed_again_and_again_equals_an_undisturbed_run(
    runs: Runs, undisturbed: Undisturbed
) -> None:
    """The controller at the seals of a stage and of the update, and between them the worker."""
    runs.train(fault="rollout.seal@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    assert "update" in runs.train(ONCE, fault="update.applied@1=kill", expect=1)
    runs.train(fault="update.seal@1=kill", expect=KILLED)
    runs.train()
    assert_as_undisturbed(runs, undisturbed)
    applied = [x for x in runs.ledger() if x["event"].startswith("steps applied")]
    # The update of iteration 1 was sealed by the last process only. The one before had applied it
    # and was killed with a checkpoint on disk that the seal would have declared.
    assert [x["iteration"] for x in applied] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(SOME_MOMENTS, id="some"),
        pytest.param(MOMENTS, id="all", marks=pytest.mark.campaign),
    ],
)
def test_killed_in_stages_and_between_them(
    runs: Runs, undisturbed: Undisturbed, moments: list[str]
) -> None:
    for moment in moments:
        # Reward and reference run side by side: one may be sealed when the other's kill comes,
        # or sealed and not noted yet.
        if moment == "reference.seal" and (1, "reference") in runs.executed("sealed"):
            continue
        runs.train(fault=f"{moment}@1=kill", expect=KILLED)
        runs.wait_for_workers_to_end()
    runs.train()
    assert_as_undisturbed(runs, undisturbed, beside="reward")
    for stage in STAGES:
        events = [x["event"] for x in runs.ledger() if (x["iteration"], x["stage"]) == (1, stage)]
        last = events.index("sealed" if "sealed" in events else "started") + 1
        assert "started" not in events[last:], (stage, events)
    applied = [x for x in runs.ledger() if x["event"].startswith("steps applied")]
    twice = [1] if "update.seal" in moments else []
    assert [x["iteration"] for x in applied] == [0, 1, *twice]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "update.step0@1=kill",
        pytest.param("update.save@1=enospc", marks=pytest.mark.campaign),
    ],
)
def test_failures_inside_the_update(runs: Runs, undisturbed: Undisturbed, fault: str) -> None:
    """Between optimizer steps, and with a full disk at the checkpoint."""
    assert "update" in runs.train(ONCE, fault=fault, expect=1)
    runs.train()
    assert_as_undisturbed(runs, undisturbed)


def test_sparse_checkpoints_replay_from_shards(runs: Runs, undisturbed: Undisturbed) -> None:
    """What lies between checkpoint and kill is repeated, but no episode is played anew."""
    sparse = "checkpoint.every=2"
    again = {"overrides": [sparse]}
    first, last = runs.train_here({**again, "fault": "reward.after@1=raise"}, again)
    assert "injected failure" in str(first)
    assert last is None
    sealed = runs.executed("sealed")
    assert [sealed.count((k, "rollout")) for k in range(2)] == [1, 1]
    assert [sealed.count((k, "update")) for k in range(2)] == [2, 1]
    assert runs.weights(1) == undisturbed().weights(1)

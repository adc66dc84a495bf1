"""Runs whose selector divides the cores between rollout and update, and divides them anew."""

from __future__ import annotations

import pytest

from earl_core.run.checkpoints import HANDOFFS
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, write_table
from tests.flows.runs import LEARNING, Runs
from tests.flows.test_selector_runs import observations, plan, selector
from tests.learnt import assert_learnt, largest_change, weights_in

OVERLAPPED = (
    *LEARNING,
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
    "evaluation.every=2",
    "evaluation.episodes=8",
    "checkpoint.every=4",
)

HELD = ["update.max_tokens_per_microbatch", "update.activation_checkpointing"]

GUESSED, PLAYED = 10.0, 42.0
"""Tokens of an episode, as they are guessed before the first one, and as they are."""


def measured(key: str, context: float, rate: float) -> ProfilePoint:
    place = {"context": context, "requests": 32.0, "weight": 4.0}
    return ProfilePoint(key=key, tokens_per_second=rate, **place)


def placement(runs: Runs, iteration: int) -> str:
    division = plan(runs, iteration).division
    assert division is not None
    return division.placement


@pytest.mark.slow
def test_cores_change_sides_between_iterations_and_the_run_learns_the_same(runs: Runs) -> None:
    """By what is measured, apart is faster under the load that is guessed at first, and in turn
    under the load that there is. No checkpoint holds the state that changes hands."""
    apart, whole = "update tp1 mb1024 on1", "update tp1 1x2threads mb1024"
    settings = (
        *OVERLAPPED,
        selector(runs, fixed_fields=HELD),
        "update.max_tokens_per_microbatch=1024",
    )
    runs.train(*settings, "name=apart", "stages.placement=separate")
    (table,) = (runs.directory / "profiles").glob("*.parquet")
    points = (
        measured(apart, GUESSED, 1e6),
        measured(whole, GUESSED, 1.0),
        measured(apart, PLAYED, 1e-4),
        measured(whole, PLAYED, 1e6),
    )
    write_table(table.parent, table.stem, ProfileTable(points=points))
    runs.train(*settings)

    first, last = plan(runs, 0), plan(runs, 3)
    assert placement(runs, 0) == placement(runs, 1) == "separate"
    assert first["rollout"].threads == first["update"].threads == 1
    assert placement(runs, 2) != "separate"
    assert last["update"].threads == 2
    assert "staleness 2 would gain" in last.reasons["placement"]
    events = [line["event"] for line in runs.ledger()]
    assert [event for event in events if event.startswith("devices change sides: separate (1")]
    assert sorted({k for k, stage in runs.executed("sealed") if stage == "evaluation"}) == [0, 2, 4]
    # Nothing was done twice for that, and no rollout was older than it may be.
    assert sorted(runs.executed("sealed")) == sorted(set(runs.executed("sealed")))
    assert [line["update/age_max"] for line in runs.metrics()] == [0, 1, 1, 1]
    after = weights_in(runs.policy(3))
    assert_learnt([x["update/grad_norm"] for x in runs.metrics()], weights_in(runs.model), after)
    assert largest_change(after, weights_in(runs.policy(3, "apart"))) < 1e-4
    assert not (runs.run() / HANDOFFS).exists()
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


@pytest.mark.slow
def test_a_stream_is_laid_out_and_its_batches_are_observed(runs: Runs) -> None:
    mode = "schedule={staleness: 1, mode: stream}"
    settings = (*LEARNING, mode, "algorithm.importance_correction={}", selector(runs))
    runs.train(*settings, "iterations=3", "stages.placement=colocated")
    runs.assert_learnt()
    rates = {
        seen.iteration: seen.tokens_per_second
        for seen in observations(runs, "measured")
        if seen.stage == "rollout"
    }
    assert sorted(rates) == [0, 1, 2]
    assert min(rates.values()) > 0
    # What was observed is what the next plan predicts by.
    last = plan(runs, 2)
    assert last.policy == "live_tokens"
    assert last.predictions["rollout"].measured > 0
    runs.wait_for_workers_to_end()

"""What a run learns from its own layouts: rates, memory, the cost of switches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import (
    Observation,
    attempts_of,
    calibration_of,
    decode_rate,
    forbidden_of,
    overflow_tokens,
    refined,
    seconds_of,
    training_rate,
)
from earl_core.selector.profile.profile_table import ProfileTable, key_of
from tests.selector.examples import given

UPDATE = StageDeployment(stage="update", max_tokens_per_microbatch=8192)
ROLLOUT = StageDeployment(stage="rollout", replicas=2, max_running_requests=64)


def seen(kind: Any, deployment: StageDeployment = UPDATE, **fields: Any) -> Observation:
    values = {"iteration": 3, "stage": deployment.stage, **fields}
    return Observation(kind=kind, deployment=deployment, **values)


def taught(base: SelectionInput, observations: list[Observation]) -> SelectionInput:
    """As a run puts them in."""
    profile = refined(base.profile, observations, 16.0, base.hardware)
    return base.model_copy(
        update={
            "profile": profile,
            "calibration": calibration_of(observations),
            "forbidden": forbidden_of(observations, base.iteration),
            "context_overflow": overflow_tokens(observations),
        }
    )


@pytest.mark.parametrize("stage", ["rollout", "update"])
def test_what_was_measured_is_predicted_next(stage: str) -> None:
    """Nothing counts twice: reading prompts and waiting for tools are no part of the rate."""
    base = given(4096.0)
    base = base.model_copy(
        update={"statistics": base.statistics.model_copy(update={"tool_wait_seconds": (0.25,)})}
    )
    plan, predictor = select(base), Predictor(base)
    deployment, load = plan[stage], predictor.now
    layout = predictor.candidate_of(deployment)
    guess = predictor.predict(layout, load).seconds
    for factor in (0.8, 3.0):
        seconds = factor * guess
        if stage == "rollout":
            rate = decode_rate(predictor.roofline, layout, load, seconds)
            requests = load.offered(layout)
        else:
            rate, requests = training_rate(load, seconds), float(load.episodes)
        fields = {"context": load.context, "requests": requests, "tokens_per_second": rate}
        lesson = [seen("measured", deployment, iteration=k, **fields) for k in range(8)]
        after = Predictor(taught(base, lesson)).predict(layout, load)
        assert after.seconds == pytest.approx(seconds, rel=0.02)
        assert after.measured > 0.9


def test_a_refined_profile_is_of_what_was_measured_only() -> None:
    fields = {"context": 512.0, "requests": 32.0, "tokens_per_second": 100.0}
    lesson = [
        seen("measured", **fields),
        seen("out_of_memory", **fields),
        seen("switched", seconds=3.0),
        seen("measured", **{**fields, "tokens_per_second": 0.0}),
    ]
    (point,) = refined(ProfileTable(), lesson, 16.0, Hardware(cpu_cores=1, memory_bytes=1)).points
    assert point.key == key_of(UPDATE)
    assert (point.tokens_per_second, point.iteration) == (100.0, 3)


def test_a_layout_that_ran_out_of_memory_is_not_taken_again() -> None:
    base = given(8192.0)
    plan = select(base)
    predictor = Predictor(base)
    row = predictor.predict(predictor.candidate_of(plan["update"]), predictor.now)
    lesson = seen(
        "out_of_memory",
        plan["update"],
        peak_bytes=row.budget,
        formula_bytes=predictor.formula_peak(row.candidate, predictor.now),
    )
    after = select(taught(base, [lesson]))
    assert after["update"] != plan["update"]
    (forbidden,) = forbidden_of([lesson, lesson], lesson.iteration)
    assert forbidden.deployment == plan["update"]
    # Nor anything for which the formula says as much.
    (peak,) = calibration_of([lesson]).peaks
    assert calibration_of([lesson]).correct("update", peak.predicted) > row.budget


def test_a_failure_is_forgotten_once_as_much_has_worked() -> None:
    failed = seen("out_of_memory", peak_bytes=8.0, formula_bytes=10.0)
    worked = seen("measured", peak_bytes=7.0, formula_bytes=10.0)
    assert [p.out_of_memory for p in calibration_of([failed]).peaks] == [True]
    assert [p.out_of_memory for p in calibration_of([failed, worked]).peaks] == [False]
    assert [p.out_of_memory for p in calibration_of([worked, failed]).peaks] == [False, True]
    smaller = seen("measured", peak_bytes=7.0, formula_bytes=9.0)
    assert [p.out_of_memory for p in calibration_of([failed, smaller]).peaks] == [False, True]


def test_what_failed_is_forbidden_for_loads_that_are_no_smaller() -> None:
    """In its own iteration whatever the load: what that is was only forecast."""
    failed = seen("out_of_memory", iteration=3, peak_bytes=8.0, formula_bytes=10.0)
    assert [item.beyond_bytes for item in forbidden_of([failed], 3)] == [0.0]
    (later,) = forbidden_of([failed], 4)
    assert 0 < later.beyond_bytes < 10.0
    worked = seen("measured", iteration=4, peak_bytes=7.0, formula_bytes=10.0)
    assert forbidden_of([failed, worked], 5) == ()
    assert len(forbidden_of([worked, failed], 5)) == 1
    elsewhere = worked.model_copy(update={"stage": "rollout"})
    assert len(forbidden_of([failed, elsewhere], 5)) == 1


def test_a_layout_comes_back_once_contexts_are_short_again() -> None:
    short, long = given(2048.0), given(16384.0)
    layout = select(short)["update"]
    predictor = Predictor(long)
    candidate = predictor.candidate_of(layout)
    lesson = seen(
        "out_of_memory",
        layout,
        iteration=0,
        peak_bytes=predictor.budget("update"),
        formula_bytes=predictor.formula_peak(candidate, predictor.now),
    )
    assert candidate in Predictor(taught(long, [lesson])).forbidden
    assert candidate not in Predictor(taught(short, [lesson])).forbidden
    assert select(taught(short, [lesson]))["update"] == layout


def test_what_is_last_counts() -> None:
    lines = [
        seen("switched", seconds=5.0),
        seen("switched", ROLLOUT, seconds=9.0),
        seen("switched", seconds=0.1),
        seen("resharded", seconds=0.2),
    ]
    assert seconds_of(lines, "switched") == {"update": 0.1, "rollout": 9.0}
    assert seconds_of(lines, "resharded") == {"update": 0.2}


def test_attempts_are_the_failures_that_had_the_choice_made_again() -> None:
    lines = [
        seen("out_of_memory"),
        seen("context_overflow", ROLLOUT, longest=99.0),
        seen("out_of_memory", ROLLOUT, answered=False),
        seen("measured"),
    ]
    assert attempts_of(lines, 3) == 2
    assert attempts_of(lines, 4) == 0


@for_all(tokens=st.integers(1, 10**5), policy=st.sampled_from(["fixed", "live_tokens"]))
@settings(max_examples=30, deadline=None)
def test_an_outgrown_context_is_at_least_doubled(tokens: int, policy: str) -> None:
    base = given(256.0, selector={"policy": policy}, rollout={"max_model_len": 1024})
    base = base.model_copy(update={"current": select(base)})
    before = base.current["rollout"].max_model_len
    lesson = seen(
        "context_overflow", base.current["rollout"], longest=float(max(tokens, before + 1))
    )
    length = select(taught(base, [lesson]))["rollout"].max_model_len
    assert length >= min(2 * before, base.model.max_positions)
    assert length > lesson.longest or length == base.model.max_positions


@pytest.mark.parametrize("policy", ["fixed", "average_context", "live_tokens"])
def test_every_policy_says_what_it_expects(policy: str) -> None:
    base = given(8192.0, selector={"policy": policy}, needs_reference=True)
    plan = select(base.model_copy(update={"attempt": 2}))
    assert plan.attempt == 2
    assert set(plan.predictions) == {"rollout", "reference", "update"}
    assert all(p.seconds > 0 and p.tokens_per_second > 0 for p in plan.predictions.values())

"""Loads that grow, or come and go: what is forecast, and that a layout fits it in time."""

from __future__ import annotations

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import choose_as_far_as_it_fits, select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import forecast
from tests.selector.examples import bare, given


def layouts(plan: DeploymentPlan) -> dict[str, StageDeployment]:
    return {stage: bare(item) for stage, item in plan.stages.items()}


@examples(st.lists(st.floats(-1, 1), min_size=3, max_size=12), st.floats(0.01, 0.3))
def test_noise_has_no_trend(noise: list[float], size: float) -> None:
    series = [1000 * (1 + 0.49 * size * value) for value in noise]
    assert forecast(series, 5, size) == pytest.approx(series[-1])


def test_growth_is_forecast_and_shrinking_is_not() -> None:
    assert forecast([100, 110, 120, 130], 3, 0.03) == pytest.approx(160)
    assert forecast([130, 120, 110, 100], 3, 0.03) == 100
    assert forecast([], 3, 0.03) == 0.0


def test_a_switch_comes_before_memory_runs_out() -> None:
    """The layout in use still fits what was seen, but not what the growth will bring."""
    last = 10000.0
    steady = given(last, gpus=8, model="qwen2.5-7b", rollout={"max_model_len": None})
    plan = select(steady)
    growing = tuple(last * 1.1**step for step in range(-5, 1))
    later = given(
        growing, gpus=8, model="qwen2.5-7b", rollout={"max_model_len": None}, current=plan,
        selector={"forecast": 12},
    )  # fmt: skip
    predictor = Predictor(later)
    old = predictor.candidate_of(plan["update"])
    budget = predictor.budget("update")
    assert predictor.formula_peak(old, predictor.now._replace(longest=2 * last)) <= budget
    changed = select(later)
    assert layouts(changed)["update"] != layouts(plan)["update"]
    assert predictor.peak(bare(changed["update"]), predictor.ahead) <= budget
    assert "needs" in changed.reasons["update"]


def test_loads_that_come_and_go_find_a_layout_that_fits_both() -> None:
    """A layout chosen after a short iteration would run out of memory in every long one."""
    plan, small, large = None, 2282.0, 9731.0
    for iteration in range(2, 14):
        means = tuple(large if step % 2 else small for step in range(iteration))[-8:]
        item = given(means, episodes=256, rollout={"max_model_len": 65536}, current=plan)
        after, predictor = select(item), Predictor(item)
        load = predictor.now._replace(context=large, longest=2 * large)
        update = predictor.candidate_of(after["update"])
        assert predictor.formula_peak(update, load) <= predictor.budget("update")
        # Two values are growth, eight are not.
        assert iteration < 9 or plan is None or layouts(after) == layouts(plan)
        plan = after


def test_growth_that_would_fit_nowhere_ends_no_run_before_it_is_there() -> None:
    growing = tuple(250.0 * step for step in range(1, 9))
    host = Hardware(cpu_cores=2, memory_bytes=27 * 2**27)
    item = given(
        growing, model="smollm2-135m", episodes=8, hardware=host,
        rollout={"max_model_len": None, "engine": "torch"},
    )  # fmt: skip
    with pytest.raises(NoFeasiblePlan):
        select(item)
    shorter, plan = choose_as_far_as_it_fits(item)
    assert shorter.selector.forecast == 1
    assert select(shorter) == plan
    roomy = item.model_copy(update={"hardware": host.model_copy(update={"memory_bytes": 2**34})})
    assert choose_as_far_as_it_fits(roomy) == (roomy, select(roomy))
    tight = item.model_copy(update={"hardware": host.model_copy(update={"memory_bytes": 2**30})})
    with pytest.raises(NoFeasiblePlan, match=r"[GM]iB are available"):
        choose_as_far_as_it_fits(tight)

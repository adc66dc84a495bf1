"""`select` is a pure function of its input."""

from __future__ import annotations

import doctest

from earl_core.config.rollout import RolloutConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.selector.choice import selection
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput, Statistics

SHAPE = ModelShape(
    model_type="llama",
    hidden_size=64,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    vocabulary=100,
    max_positions=8192,
)


def given(context_max: float = 0.0, **rollout: int) -> SelectionInput:
    sizes = {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 3, "max_model_len": 1000}
    return SelectionInput(
        iteration=3,
        rollout=RolloutConfig(**{**sizes, **rollout}),
        update=UpdateConfig(threads=3),
        needs_reference=False,
        hardware=Hardware(cpu_cores=2, memory_bytes=2**30),
        model=SHAPE,
        statistics=Statistics(context_max=(context_max,)),
    )


def test_equal_inputs_give_equal_plans_with_a_reason_for_each_stage() -> None:
    plan = select(given())
    assert plan == select(SelectionInput.model_validate_json(given().model_dump_json()))
    assert set(plan.reasons) == set(plan.stages) == {"rollout", "experience", "update"}
    assert plan["update"].threads == 3
    assert plan["rollout"].world_size == 1


def test_reference_gets_a_deployment_when_needed() -> None:
    plan = select(given().model_copy(update={"needs_reference": True}))
    assert plan["reference"].stage == "reference"


def test_context_is_raised_before_it_is_reached_and_never_lowered() -> None:
    assert select(given(790))["rollout"].max_model_len == 1000
    raised = select(given(810))
    assert raised["rollout"].max_model_len == 2000
    assert "raised from 1000 to 2000" in raised.reasons["rollout"]
    later = given(100).model_copy(update={"current": raised})
    assert select(later)["rollout"].max_model_len == 2000
    assert select(given(8000))["rollout"].max_model_len == 8192


def test_the_worked_example_is_true() -> None:
    tried = doctest.testmod(selection)
    assert tried.attempted > 4
    assert tried.failed == 0

"""A critic is laid out, predicted and moved as the update is; its own ranks say its values."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from earl_core.config.critic import CriticConfig
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.selector.choice.explain import considered
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, fixed_plan
from tests.selector.examples import GIB, given, host

CRITIC = CriticConfig()


def test_fixed_lays_it_out_as_the_update() -> None:
    plan = fixed_plan(given(critic=CRITIC))
    assert plan["critic"] == plan["update"]._replace(stage="critic")
    assert plan["value"] == plan["critic"]._replace(stage="value")
    assert "critic's ranks" in plan.reasons["value"]
    assert not {"critic", "value"} & fixed_plan(given()).stages.keys()


def test_it_is_a_choice_that_takes_what_the_update_takes() -> None:
    """Equal candidates, seconds and memory but for its own epochs; its seconds count."""
    asked = given(context=24000.0, critic=CRITIC)
    plan, found = select(asked), considered(asked).predictions
    assert plan["critic"] == plan["update"]._replace(stage="critic")
    assert plan["value"] == plan["critic"]._replace(stage="value")
    assert set(plan.predictions) == {"rollout", "update", "critic", "value"}
    assert "value" not in found
    for mine, update in zip(found["critic"], found["update"], strict=True):
        assert mine.candidate == update.candidate._replace(stage="critic")
        assert (mine.seconds, mine.peak) == (update.seconds, update.peak)
    longer = given(context=24000.0, critic=CriticConfig(epochs=3))
    update, critic = (select(longer).predictions[stage] for stage in ("update", "critic"))
    assert critic.seconds > 2 * update.seconds
    assert select(asked).predictions["value"].seconds < update.seconds / 2


def test_a_choice_with_a_critic_takes_little_time() -> None:
    asked = given(critic=CRITIC, needs_reference=True)
    select(asked)
    began = time.process_time()
    for _ in range(5):
        select(asked)
    assert (time.process_time() - began) / 5 < 0.1


def beside(memory: float, critic: CriticConfig | None) -> SelectionInput:
    """On cores, where all work at the same time."""
    asked = host(memory, staleness=1, critic=critic)
    stages = asked.stages.model_copy(update={"placement": "shared"})
    return asked.model_copy(update={"stages": stages})


def in_turn(memory: float, critic: CriticConfig | None) -> SelectionInput:
    """On GPUs, whose host holds what rests meanwhile."""
    asked = given(model="qwen2.5-7b", critic=critic)
    hardware = asked.hardware.model_copy(update={"memory_bytes": int(16 * memory * GIB)})
    return asked.model_copy(update={"hardware": hardware})


@pytest.mark.parametrize("make", [beside, in_turn])
def test_its_memory_counts(make: Callable[..., SelectionInput]) -> None:
    def least(critic: CriticConfig | None) -> float:
        for memory in np.arange(1.0, 40.0, 0.5):
            with suppress(NoFeasiblePlan):
                select(make(memory, critic))
                return float(memory)
        raise AssertionError("nothing is enough")

    assert least(CRITIC) > 1.3 * least(None)


def test_live_ranks_are_resharded() -> None:
    before = StageDeployment("critic", shard=4)
    assert move_between(before, before._replace(shard=2, tensor_parallel=2)) == "reshard"
    assert move_between(before, before._replace(logits_chunk_tokens=7)) == "settings"
    assert move_between(before, before._replace(shard=2)) == "rebuild"

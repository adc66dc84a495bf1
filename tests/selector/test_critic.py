"""A critic is laid out, predicted and moved as the update is; its own ranks say its values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from earl_core.config import parse_config
from earl_core.config.critic import CriticConfig
from earl_core.control.machine_profile import fingerprint_of
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.selector.choice.explain import considered
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, fixed_plan
from tests.config.test_critic import GAE
from tests.config.test_stage_keys import BASE
from tests.selector.examples import GIB, given, host

CRITIC = CriticConfig()


def test_fixed_lays_it_out_as_the_update() -> None:
    plan = fixed_plan(given(critic=CRITIC))
    assert plan["critic"] == plan["update"]._replace(stage="critic")
    assert plan["value"] == plan["critic"]._replace(stage="value")
    assert "critic's ranks" in plan.reasons["value"]
    assert not {"critic", "value"} & fixed_plan(given()).stages.keys()


def test_it_is_a_choice_of_its_own_whose_seconds_count() -> None:
    asked = given(context=24000.0, critic=CRITIC)
    plan, found = select(asked), considered(asked).predictions
    assert plan["value"] == plan["critic"]._replace(stage="value")
    assert set(plan.predictions) == {"rollout", "update", "critic", "value"}
    assert "value" not in found
    update, critic = (plan.predictions[stage] for stage in ("update", "critic"))
    assert 0.5 * update.seconds < critic.seconds < update.seconds
    assert plan.predictions["value"].seconds < critic.seconds / 2
    longer = given(context=24000.0, critic=CriticConfig(epochs=3))
    assert select(longer).predictions["critic"].seconds > 2 * critic.seconds


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-1.5b"])
def test_it_is_what_the_update_is_but_for_the_output_layer(model: str) -> None:
    """Of the same layout: less of the state where that has weights of its own, and no logits."""
    asked = given(model=model, critic=CRITIC)
    predictor, update = Predictor(asked), select(asked)["update"]
    update = predictor.candidate_of(update)
    critic = update._replace(stage="critic")
    shape, ranks = asked.model, update.tensor_parallel * update.parts
    layer = 16 * (shape.vocabulary - 1) * shape.hidden_size
    saved = predictor.own_part(update) - predictor.own_part(critic)
    one_output = 16 * shape.hidden_size
    assert saved * ranks == pytest.approx(-one_output if shape.tied_embeddings else layer)
    load = predictor.now
    assert predictor.formula_peak(critic, load) < predictor.formula_peak(update, load) - saved
    assert predictor.predict(critic, load).seconds < predictor.predict(update, load).seconds
    chunked = critic._replace(logits_chunk_tokens=64)
    assert predictor.formula_peak(chunked, load) == pytest.approx(
        predictor.formula_peak(critic, load), rel=1e-3
    )


def test_its_minibatches_are_its_own() -> None:
    """A budget that they never fill takes no memory."""
    few, many = (
        Predictor(given(context=500.0, episodes=64, critic=CriticConfig(minibatches=steps)))
        for steps in (1, 8)
    )
    critic = few.candidate_of(select(few.given)["critic"])
    critic = critic._replace(max_tokens_per_microbatch=2**20)
    assert many.formula_peak(critic, many.now) < 0.9 * few.formula_peak(critic, few.now)
    update = critic._replace(stage="update")
    assert many.formula_peak(update, many.now) == few.formula_peak(update, few.now)


def test_measurements_hold_for_critics_that_take_as_many_steps() -> None:
    def mark(**critic: float) -> str:
        config = parse_config(BASE | GAE | {"critic": critic})
        return fingerprint_of(config, asked.hardware, asked.model)

    asked = given(critic=CRITIC)
    assert mark() == mark(learning_rate=1e-3) != mark(minibatches=8)


def test_its_candidates_multiply_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice predicts, and computes the memory of, as many more as a critic alone brings."""
    asked = dict.fromkeys(("predict", "formula_peak"), 0)

    def counted(name: str) -> Callable[..., object]:
        own = getattr(Predictor, name)

        def count(*given: object) -> object:
            asked[name] += 1
            return own(*given)

        return count

    for name in asked:
        monkeypatch.setattr(Predictor, name, counted(name))

    def work(**settings: Any) -> np.ndarray:
        asked.update(dict.fromkeys(asked, 0))
        select(given(**settings))
        return np.array(list(asked.values()))

    plain, critic, reference = work(), work(critic=CRITIC), work(needs_reference=True)
    assert (plain > 0).all()
    assert (critic < 3 * plain).all()
    both = work(critic=CRITIC, needs_reference=True)
    assert (both - plain <= (critic - plain) + (reference - plain)).all()


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

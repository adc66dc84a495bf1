"""A reference stage whose model is another one than the policy."""

from __future__ import annotations

import pytest

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.model.catalogue import MODELS
from tests.selector.examples import given

POLICY, TEACHER = MODELS["qwen2.5-0.5b"], MODELS["qwen2.5-7b"]
MESH = StageDeployment("reference", 1, 1, 1, 8, max_tokens_per_microbatch=4096)


def test_a_teachers_weights_and_work_are_its_own() -> None:
    small = given(model="qwen2.5-0.5b", needs_reference=True)
    own = Predictor(small)
    taught = Predictor(small.model_copy(update={"reference_models": (TEACHER,)}))
    as_policy = Predictor(given(model="qwen2.5-7b", needs_reference=True))
    load = own.now
    assert taught.formula_peak(MESH, load) == as_policy.formula_peak(MESH, load)
    assert taught.formula_peak(MESH, load) > 4 * TEACHER.parameters / 8
    update = MESH._replace(stage="update")
    assert taught.formula_peak(update, load) == own.formula_peak(update, load)
    seconds = [each.predict(MESH, load).seconds for each in (own, taught, as_policy)]
    assert seconds[1] == seconds[2] > 5 * seconds[0]


def test_several_references_are_held_together() -> None:
    alone = given(model="qwen2.5-0.5b", needs_reference=True, reference_models=(TEACHER,))
    both = alone.model_copy(update={"reference_models": (POLICY, TEACHER)})
    load = Predictor(both).now
    more = Predictor(both).formula_peak(MESH, load) - Predictor(alone).formula_peak(MESH, load)
    assert more == pytest.approx(4 * POLICY.parameters / 8)


def test_the_plan_splits_a_large_teacher() -> None:
    asked = given(model="qwen2.5-0.5b", gpus=8, needs_reference=True)
    large = asked.model_copy(update={"reference_models": (MODELS["qwen2.5-72b"],)})
    plan = select(large)
    chosen = plan["reference"]
    assert chosen.tensor_parallel * chosen.parts == 8
    predictor = Predictor(large)
    assert predictor.fits(predictor.candidate_of(chosen))

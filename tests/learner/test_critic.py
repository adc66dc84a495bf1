"""A learner of values: its samples, its precision, its shell for another mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from earl_core.learner.data.value_samples import first_of_turns
from earl_core.learner.lm_head import ValueHead, head_of
from earl_core.learner.parallel_model import build_shell
from earl_core.learner.value_regression import ValueRegression
from earl_core.learner.value_scoring import ValueScoring
from tests.learner.helpers import random_samples, save_model
from tests.learner.test_policy_learner import make_learner


def test_a_turn_is_its_first_trained_token() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1, 0], np.uint8)
    # The second turn has no trained token; the third begins with one that is not.
    found = first_of_turns(mask, np.array([0, 4, 5, 8], np.int32))
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 1, 0]
    assert not first_of_turns(np.zeros(4, np.uint8), np.array([0, 2])).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_begin_at_nothing_and_learn(precision: str, tmp_path: Path) -> None:
    """Towards one return; in bf16 as in float32 to what bf16 rounds. The tied head is given up."""
    directory = save_model("qwen2", tmp_path)
    learner = make_learner(directory, ValueRegression(None), precision=precision, epochs=30)
    assert isinstance(head_of(learner.model), ValueHead)
    samples = random_samples(6)
    before = learner.score(samples)
    assert not any(each.any() for each in before)
    told = [
        dataclasses.replace(each, values=zeros, advantages=np.full_like(zeros, 0.5))
        for each, zeros in zip(samples, before, strict=True)
    ]
    metrics = learner.update(told, iteration=0)
    assert metrics["grad_norm"] > 1e-3
    values = np.concatenate(
        [v[s.loss_mask != 0] for v, s in zip(learner.score(samples), samples, strict=True)]
    )
    assert abs(values - 0.5).mean() < 0.1


def test_a_shell_for_another_mesh_has_the_head_too(tmp_path: Path) -> None:
    learner = make_learner(save_model("qwen2", tmp_path), ValueRegression(0.2))
    shell = build_shell(learner.parallel, learner.mesh)
    assert isinstance(shell.module.scoring, ValueScoring)
    shapes, wanted = (
        {name: tuple(each.shape) for name, each in parallel.model.named_parameters()}
        for parallel in (shell, learner.parallel)
    )
    assert shapes == wanted
    assert shapes["lm_head.weight"][0] == 1

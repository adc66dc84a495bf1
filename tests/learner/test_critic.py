"""A learner of values: its samples, its precision, its shell for another mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.config import parse_config
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.value_samples import first_of_turns
from earl_core.learner.lm_head import ValueHead, head_of
from earl_core.learner.measure_update import measure_training
from earl_core.learner.parallel_model import build_shell
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.value_regression import ValueRegression
from earl_core.learner.value_scoring import ValueScoring
from tests.config.test_critic import GAE
from tests.config.test_stage_keys import BASE
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


@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_loss_is_that_of_ppos_own_code_however_it_is_cut(tokens: int, tmp_path: Path) -> None:
    """Half the mean over all time steps of the larger of two squared errors, as in verl and TRL, in
    one microbatch or in many."""
    clip, random = 0.1, np.random.default_rng(4)
    learner = make_learner(
        save_model("qwen2", tmp_path), ValueRegression(clip), max_tokens_per_microbatch=tokens
    )
    # Learnt already, and something else before its update.
    head = head_of(learner.model).weight
    head.data.copy_(torch.linspace(-0.1, 0.1, head.numel()).reshape(head.shape))
    samples = [
        dataclasses.replace(each, values=random.normal(0, 0.2, len(each.tokens)).astype("f4"))
        for each in random_samples(6)
    ]
    loss = count = clipped = 0.0
    for sample, now in zip(samples, learner.score(samples), strict=True):
        assert sample.values is not None
        assert sample.advantages is not None
        at = sample.loss_mask != 0
        new, old, more = (
            each[at].astype(np.float64) for each in (now, sample.values, sample.advantages)
        )
        near = np.clip(new, old - clip, old + clip)
        errors = (new - old - more) ** 2, (near - old - more) ** 2
        loss += 0.5 * np.maximum(*errors).sum()
        clipped += float((errors[1] > errors[0]).sum())
        count += len(new)
    found = learner.update(samples, iteration=0)
    assert found["grad_norm"] > 0.1
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["clip_fraction"] == pytest.approx(clipped / count)
    assert 0 < clipped < count


def test_a_profile_measures_it_and_a_policy_that_rests_meanwhile(tmp_path: Path) -> None:
    """By its own steps, with values, and without log-probs that only a policy's loss compares."""
    config, model = (
        parse_config(BASE | GAE | {"update": {"minibatches": 2}}),
        save_model("qwen2", tmp_path),
    )
    assert config.needs_old_logprobs
    critic = make_learner(model, ValueRegression(0.2), minibatches=4)
    policy = PolicyLearner(
        ModelConfig(path=str(model)), UpdateConfig(threads=1), AlgorithmConfig(), resting=2
    )
    for learner in (critic, policy):
        assert measure_training(learner, config, 32, 8)["step_seconds"] > 0


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

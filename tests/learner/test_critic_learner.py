"""A learner whose model says values: its loss, however it is cut, and what a profile measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.config import parse_config
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.measure_update import measure_training
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.value_regression import ValueRegression
from earl_core.trajectory.schema import SAMPLE_BITS
from tests.config.test_critic import GAE
from tests.config.test_stage_keys import BASE
from tests.learner.helpers import save_model

CLIP = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("critic") / "model")


def critic(model: Path, **update: object) -> PolicyLearner:
    """With a head that is not 0."""
    given = {"precision": "fp32", "threads": 1, "learning_rate": 1e-2, "max_grad_norm": 1e9}
    settings = UpdateConfig.model_validate(given | update)
    learner = PolicyLearner(ModelConfig(path=str(model)), settings, ValueRegression(CLIP))
    with torch.no_grad():
        head = learner.model.get_output_embeddings().weight
        head.copy_(torch.linspace(-0.1, 0.1, head.numel()).reshape(head.shape))
    return learner


def samples(learner: PolicyLearner) -> list[TrainingSample]:
    """Of unequal lengths; before its update the critic said something else than it does now."""
    random = np.random.default_rng(4)
    made = []
    for number, length in enumerate((5, 9, 17, 6, 30, 11)):
        mask = (random.random(length) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        made.append(
            TrainingSample(
                tokens=random.integers(5, 60, length, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(length, np.float32),
                advantages=random.normal(size=length).astype(np.float32),
                values=random.normal(scale=0.2, size=length).astype(np.float32),
                episode_id=number,
                group_id=number // 2,
                sample_id=number << SAMPLE_BITS,
            )
        )
    return made


@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_loss_is_ppos_own_however_it_is_cut(model: Path, tokens: int) -> None:
    """Half the mean over time steps of the larger of two squared errors (verl's
    `compute_value_loss`, TRL's `PPOTrainer`), in one microbatch or many."""
    learner = critic(model, max_tokens_per_microbatch=tokens)
    given = samples(learner)
    loss, count, clipped = 0.0, 0, 0
    for sample, now in zip(given, learner.score(given), strict=True):
        at = sample.loss_mask != 0
        assert sample.values is not None
        assert sample.advantages is not None
        new, old = now[at].astype(np.float64), sample.values[at].astype(np.float64)
        returns = old + sample.advantages[at]
        errors = (new - returns) ** 2, (np.clip(new, old - CLIP, old + CLIP) - returns) ** 2
        loss += 0.5 * np.maximum(*errors).sum()
        clipped += int((errors[1] > errors[0]).sum())
        count += len(new)
    found = learner.update(given, iteration=0)
    assert found["grad_norm"] > 0.1
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["clip_fraction"] == pytest.approx(clipped / count)
    assert 0 < clipped < count


def test_a_profile_measures_it(model: Path) -> None:
    """By its own steps, with values, and without log-probs that only a policy's loss compares."""
    config = parse_config(BASE | GAE | {"update": {"minibatches": 2}})
    assert config.needs_old_logprobs
    found = measure_training(critic(model, minibatches=4), config, 32, 8)
    assert found["step_seconds"] > 0
    assert found["tokens_per_second"] > 0


def test_a_profile_measures_the_policy_that_rests_at_first(model: Path) -> None:
    policy = PolicyLearner(
        ModelConfig(path=str(model)), UpdateConfig(threads=1), AlgorithmConfig(), resting=2
    )
    assert measure_training(policy, parse_config(BASE), 32, 8)["step_seconds"] > 0

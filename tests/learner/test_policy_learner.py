"""Scores and updates, against an independent plain-torch implementation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs, PolicyLoss
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.microbatches import Algorithm
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.policy_learner import PolicyLearner, UpdateRefused
from earl_core.system.errors import ConfigError
from tests.algorithms.reference import policy_terms
from tests.learner.helpers import (
    ARCHITECTURES,
    eager_model,
    plain_logprobs,
    random_samples,
    save_model,
    with_old_logprobs,
)

TEMPERATURE = 0.7


def make_learner(
    directory: Path,
    algorithm: dict[str, Any] | Algorithm | None = None,
    *,
    mesh: UpdateMesh | None = None,
    logits_chunk_tokens: int | None = None,
    adapter: dict[str, Any] | None = None,
    seed: int = 0,
    **update: Any,
) -> PolicyLearner:
    settings = {
        "precision": "fp32",
        "learning_rate": 1e-3,
        "max_tokens_per_microbatch": 64,
        "compile": False,
    }
    return PolicyLearner(
        ModelConfig(path=str(directory), adapter=adapter),
        UpdateConfig(**(settings | update)),
        algorithm if isinstance(algorithm, Algorithm) else AlgorithmConfig(**(algorithm or {})),
        temperature=TEMPERATURE,
        iterations=10,
        seed=seed,
        mesh=mesh,
        logits_chunk_tokens=logits_chunk_tokens,
    )


def weights_of(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights().items()}


def largest_difference(first: PolicyLearner, second: PolicyLearner) -> float:
    theirs = second.named_weights()
    return max(
        float((tensor - theirs[name]).abs().max()) for name, tensor in first.named_weights().items()
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_scores_equal_full_unpacked_logits(kind: str, tmp_path: Path) -> None:
    learner = make_learner(save_model(kind, tmp_path))
    samples = random_samples(12)
    plain = eager_model(tmp_path)
    for sample, scored in zip(samples, learner.score(samples), strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        assert scored.dtype == np.float32
        assert not scored[sample.loss_mask == 0].any()
        trained = scored[sample.loss_mask == 1]
        assert np.allclose(trained, expected.detach().numpy(), atol=2e-5)


CUT = {"cap": 1.5}
PPO = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}


def plain_ppo_step(
    directory: Path,
    samples: list[TrainingSample],
    config: UpdateConfig,
    weigh: str,
    policy_loss: dict[str, Any] = PPO,
) -> tuple[torch.nn.Module, float, float]:
    """One AdamW step of a token-wise loss with KL (k3), entropy bonus and, where the loss does not
    correct for the engine itself, truncated correction."""
    model = eager_model(directory)
    episodes = sorted({sample.episode_id for sample in samples})
    trained = dict.fromkeys(episodes, 0)
    for sample in samples:
        trained[sample.episode_id] += int(sample.loss_mask.sum())
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        keep = torch.from_numpy(sample.loss_mask.astype(bool))
        advantage, old, reference, rollout = (
            torch.from_numpy(column)[keep].double()
            for column in (
                sample.advantages, sample.old_logprobs,
                sample.reference_logprobs, sample.rollout_logprobs,
            )
        )  # fmt: skip
        logprobs, entropy = plain_logprobs(model, sample, TEMPERATURE)
        weights = torch.clip(torch.exp(old - rollout), max=1.5)
        if policy_loss["name"] == "dppo":
            weights = torch.ones_like(weights)
        terms = {
            "logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": rollout,
            "advantages": advantage, "importance_weights": weights,
        }  # fmt: skip
        policy = torch.stack(policy_terms(policy_loss, terms))
        gap = reference - logprobs
        divergence = torch.clip(torch.exp(gap) - gap - 1, max=10)
        per_token = policy + 0.1 * divergence - 0.01 * entropy
        if weigh == "token_mean":
            total = total + per_token.sum() / sum(trained.values())
        elif weigh == "sequence_mean_token_mean":
            total = total + per_token.sum() / trained[sample.episode_id] / len(episodes)
        else:
            total = total + per_token.sum() / len(episodes)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        foreach=False,
    )
    optimizer.step()
    return model, float(total), float(norm)


@pytest.mark.parametrize(
    ("kind", "weigh", "policy_loss", "correction"),
    [
        ("llama", "token_mean", PPO, CUT),
        ("qwen2", "sequence_mean_token_mean", PPO, CUT),
        ("gpt2", "sequence_mean_token_sum", PPO, CUT),
        ("llama", "token_mean", PPO, {"anchor": "rollout"}),
        ("llama", "token_mean", {"name": "cispo", "clip_high": 0.1}, CUT),
        ("qwen2", "token_mean", {"name": "dppo", "mask_low": 0.005, "mask_high": 0.002}, None),
        (
            *("gpt2", "sequence_mean_token_mean"),
            {"name": "sapo", "tau_positive": 2.0, "tau_negative": 5.0},
            CUT,
        ),
    ],
)
def test_an_update_equals_plain_torch(
    kind: str,
    weigh: str,
    policy_loss: dict[str, Any],
    correction: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    algorithm = {
        "policy_loss": policy_loss,
        "aggregation": weigh,
        "kl": {"placement": "loss", "coefficient": 0.1},
        "importance_correction": correction,
        "entropy_coefficient": 0.01,
    }
    # A large epsilon keeps Adam's first step smooth: without it every weight moves by the sign
    # of its gradient, and rounding would decide where the gradient is nearly zero.
    update = {"weight_decay": 0.1, "max_grad_norm": 0.5, "epsilon": 1e-2, "learning_rate": 0.1}
    learner = make_learner(save_model(kind, tmp_path), algorithm, **update)
    samples = random_samples(16, samples_per_episode=2)
    if correction == {"anchor": "rollout"}:
        # The engine's log-probs take the place of those of the policy before, which nobody has.
        metrics = learner.update(with_old_logprobs(samples, [None] * 16), iteration=0)
        samples = with_old_logprobs(samples, [each.rollout_logprobs for each in samples])
    else:
        metrics = learner.update(samples, iteration=0)
    plain, loss, norm = plain_ppo_step(tmp_path, samples, learner.config, weigh, policy_loss)
    assert policy_loss["name"] == "sapo" or 0.1 < metrics["clip_fraction"] < 0.9
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    ours = learner.named_weights()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(ours[name], parameter, atol=2e-5), name


def test_several_steps_from_the_engines_logprobs_equal_those_from_equal_ones_of_the_trainer(
    tmp_path: Path,
) -> None:
    """The mismatch is measured in the first step alone, whose policy is the one before."""
    save_model("llama", tmp_path)
    samples = random_samples(16)
    steps = {"minibatches": 2, "epochs": 2, "epsilon": 1e-2, "learning_rate": 0.1}
    ours = make_learner(tmp_path, {"importance_correction": {"anchor": "rollout"}}, **steps)
    scored = ours.score(samples)
    found = ours.update(with_old_logprobs(samples, [None] * 16), iteration=0)
    theirs = make_learner(tmp_path, **steps)
    same = with_old_logprobs(samples, [each.rollout_logprobs for each in samples])
    expected = theirs.update(same, iteration=0)
    assert largest_difference(ours, theirs) == 0.0
    assert found["grad_norm"] == expected["grad_norm"] > 0
    assert expected["mismatch_mean"] == 0.0
    gaps = [
        np.abs(values - sample.rollout_logprobs)[sample.loss_mask == 1]
        for values, sample in zip(scored, samples, strict=True)
    ]
    assert min(map(np.max, gaps)) <= found["mismatch_max"] <= max(map(np.max, gaps))


@pytest.mark.parametrize("policy_loss", ["ppo_clip", "gspo", "policy_gradient"])
def test_microbatches_do_not_change_the_update(policy_loss: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    samples = random_samples(20, samples_per_episode=2)
    algorithm = {
        "policy_loss": policy_loss,
        "aggregation": "sequence_mean_token_mean",
        "importance_correction": {"level": "sequence"},
        "entropy_coefficient": 0.01,
    }
    results = []
    for budget in (1, 50, 100_000):
        learner = make_learner(
            tmp_path, algorithm, max_tokens_per_microbatch=budget, epsilon=1e-2, learning_rate=0.1
        )
        results.append((learner, learner.update(samples, iteration=0)))
    assert results[0][1]["microbatches"] > results[1][1]["microbatches"] > 1
    for learner, metrics in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0][1]["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-5)
        assert largest_difference(learner, results[0][0]) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "whole"),
    [
        *[({"policy_loss": name}, name == "gspo") for name in POLICY_LOSSES.names()],
        ({"importance_correction": {"level": "token"}}, False),
        ({"importance_correction": {"level": "sequence"}}, True),
        ({"policy_loss": f"{__name__}:OfOnesOwn"}, True),
        ({"policy_loss": f"{__name__}:TokenWise"}, False),
    ],
    ids=str,
)
def test_episodes_stay_whole_where_a_part_compares_their_tokens(
    algorithm: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    learner = make_learner(save_model("llama", tmp_path), algorithm, max_tokens_per_microbatch=1)
    metrics = learner.update(random_samples(6, samples_per_episode=2), iteration=0)
    assert metrics["microbatches"] == (3 if whole else 6)


class OfOnesOwn(PolicyLoss):
    """A loss that says nothing about episodes."""

    def per_token(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -inputs.advantages * inputs.logprobs, {}


class TokenWise(OfOnesOwn):
    """A loss that says that it looks at single tokens."""

    token_wise = True


def test_checkpointed_activations_and_chunked_logits_change_nothing(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    samples = random_samples(12)
    algorithm = {"entropy_coefficient": 0.01}
    plain = make_learner(tmp_path, algorithm, epsilon=1e-2)
    expected = plain.update(samples, iteration=0)
    checkpointed = make_learner(tmp_path, algorithm, epsilon=1e-2, activation_checkpointing="full")
    forwards = []
    first = checkpointed.model.model.layers[0]
    first.self_attn.register_forward_hook(lambda *_: forwards.append(1))
    checkpointed.update(samples, iteration=0)
    assert len(forwards) == 2 * expected["microbatches"]
    assert largest_difference(plain, checkpointed) < 1e-7
    chunked = make_learner(tmp_path, algorithm, logits_chunk_tokens=3, epsilon=1e-2)
    chunked.update(samples, iteration=0)
    assert largest_difference(plain, chunked) < 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_learning_follows_the_advantages_and_is_reproducible(
    precision: str, tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    samples = random_samples(16)
    learners, steps = [], []
    for _ in range(2):
        learner = make_learner(tmp_path, precision=precision, epochs=2, minibatches=4)
        before = learner.score(samples)
        ready = with_old_logprobs(samples, before)
        metrics = learner.update(ready, iteration=0, on_step=steps.append)
        after = learner.score(samples)
        learners.append(learner)
    assert steps == [*range(8)] * 2
    assert largest_difference(*learners) == 0.0
    moved = [
        float(((b - a) * sample.advantages).sum())
        for a, b, sample in zip(before, after, samples, strict=True)
    ]
    assert sum(moved) > 0
    assert metrics["optimizer_steps"] == 8
    assert metrics["learning_rate"] == 1e-3
    assert metrics["tokens_trained"] == 2 * sum(int(s.loss_mask.sum()) for s in samples)
    assert metrics["peak_rss_bytes"] > 2**20
    assert metrics["tokens_per_second"] > 0
    assert 0 <= metrics["padding_share"] < 0.3
    assert 0 < metrics["entropy"] < 4


def test_without_old_logprobs_the_ratio_is_one_and_the_mismatch_is_the_trainers(
    tmp_path: Path,
) -> None:
    learner = make_learner(save_model("gpt2", tmp_path))
    samples = random_samples(8)
    scores = learner.score(samples)
    fresh = [
        dataclasses.replace(
            sample, old_logprobs=None, rollout_logprobs=(score + 0.25).astype(np.float32)
        )
        for sample, score in zip(samples, scores, strict=True)
    ]
    metrics = learner.update(fresh, iteration=0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(0.25, abs=1e-4)


def test_missing_columns_and_models_are_one_clear_error(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path), minibatches=2)
    sample = random_samples(1)[0]
    with pytest.raises(ValueError, match="old_logprobs: fill it with `score`"):
        learner.update([dataclasses.replace(sample, old_logprobs=None)], iteration=0)
    with pytest.raises(ValueError, match="advantages: run the advantage stage"):
        learner.update([dataclasses.replace(sample, advantages=None)], iteration=0)
    with pytest.raises(ConfigError, match=r"no model at .* set model\.path"):
        make_learner(tmp_path / "nowhere")


def test_a_gradient_that_is_not_finite_is_not_applied(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path))
    before = weights_of(learner)
    sample = random_samples(1)[0]
    broken = dataclasses.replace(sample, advantages=np.full_like(sample.advantages, np.inf))
    with pytest.raises(UpdateRefused, match="was not applied"):
        learner.update([broken], iteration=0)
    assert all(torch.equal(before[name], now) for name, now in learner.named_weights().items())


def test_an_update_without_samples_takes_no_step(tmp_path: Path) -> None:
    learner = make_learner(save_model("llama", tmp_path))
    before = weights_of(learner)
    assert learner.update([], iteration=3)["optimizer_steps"] == 0
    assert all(torch.equal(before[name], now) for name, now in learner.named_weights().items())

"""Scores and updates on the device, against plain torch in float64 logits on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.learner.policy_learner import PolicyLearner
from earl_core.tensors.slices import local_part
from tests.learner.helpers import eager_model, plain_logprobs, random_samples, save_model
from tests.learner.test_low_rank import plain_updates, trained_by_peft
from tests.learner.test_policy_learner import TEMPERATURE, make_learner, plain_ppo_step, weights_of
from tests.learnt import assert_learnt

ALGORITHM = {
    "policy_loss": {"name": "ppo_clip", "clip_high": 0.28},
    "kl": {"placement": "loss", "coefficient": 0.1},
    "importance_correction": {"cap": 1.5},
    "entropy_coefficient": 0.01,
}
SMOOTH = {"weight_decay": 0.1, "max_grad_norm": 0.5, "epsilon": 1e-2, "learning_rate": 0.1}
"""With a small epsilon Adam's first step goes by the signs of gradients, rounding decides it."""


def on(device: torch.device, learner: PolicyLearner) -> PolicyLearner:
    assert learner.device.type == device.type
    return learner


@pytest.mark.parametrize(("kind", "chunk"), [("llama", 5), ("qwen2", None), ("gpt2", None)])
def test_scores_equal_full_logits(
    device: torch.device, kind: str, chunk: int | None, tmp_path: Path
) -> None:
    learner = on(device, make_learner(save_model(kind, tmp_path), logits_chunk_tokens=chunk))
    samples, plain = random_samples(12), eager_model(tmp_path)
    for sample, scored in zip(samples, learner.score(samples), strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        trained = scored[sample.loss_mask == 1]
        assert np.allclose(trained, expected.detach().numpy(), atol=1e-4)


@pytest.mark.parametrize(("kind", "chunk"), [("llama", 5), ("qwen2", None)])
def test_an_update_equals_plain_torch_on_the_cpu(
    device: torch.device, kind: str, chunk: int | None, tmp_path: Path
) -> None:
    settings = SMOOTH | {"logits_chunk_tokens": chunk}
    learner = on(device, make_learner(save_model(kind, tmp_path), ALGORITHM, **settings))
    before = weights_of(learner)
    samples = random_samples(16, samples_per_episode=2)
    metrics = learner.update(samples, iteration=0)
    plain, loss, norm = plain_ppo_step(tmp_path, samples, learner.config, "token_mean")
    assert norm > 0.1
    assert metrics["loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    ours = learner.named_weights()
    for name, expected in plain.named_parameters():
        assert not torch.equal(ours[name], before[name])
        assert torch.allclose(ours[name].cpu(), expected, atol=1e-4), name


def test_an_update_in_bf16_points_where_float32_does(device: torch.device, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    samples, steps = random_samples(12, samples_per_episode=2), {}
    for precision in ("fp32", "bf16"):
        learner = on(
            device,
            make_learner(tmp_path, ALGORITHM, **SMOOTH, precision=precision, max_mismatch=10),
        )
        before = weights_of(learner)
        learner.update(samples, iteration=0)
        after = learner.named_weights()
        steps[precision] = torch.cat(
            [local_part(after[name] - before[name]).flatten() for name in before]
        )
    exact, rough = steps["fp32"], steps["bf16"]
    assert float(exact.norm()) > 1e-3
    assert float(torch.cosine_similarity(exact, rough, dim=0)) > 0.99
    assert 0.9 < float(rough.norm() / exact.norm()) < 1.1


@pytest.mark.parametrize(
    "other",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"max_tokens_per_microbatch": 100_000},
    ],
    ids=["selective checkpointing", "checkpointing", "one microbatch"],
)
def test_how_memory_is_saved_changes_no_update(
    device: torch.device, other: dict[str, object], tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    samples, found = random_samples(16, samples_per_episode=2), []
    for settings in (SMOOTH, SMOOTH | other):
        learner = on(device, make_learner(tmp_path, ALGORITHM, **settings))
        before = weights_of(learner)
        learner.update(samples, iteration=0)
        found.append(learner.named_weights())
    for name, weight in found[0].items():
        assert not torch.equal(weight, before[name])
        assert torch.allclose(weight, found[1][name], atol=2e-5), name


def test_a_learner_goes_on_from_its_state(device: torch.device, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    first = on(device, make_learner(tmp_path / "model", ALGORITHM, **SMOOTH))
    samples = [random_samples(12, seed=n, samples_per_episode=2) for n in range(2)]
    first.update(samples[0], iteration=0)
    (tmp_path / "state").mkdir()
    first.save(tmp_path / "state", {"iteration": 0})
    second = on(device, make_learner(tmp_path / "model", ALGORITHM, **SMOOTH))
    assert second.restore(tmp_path / "state")["iteration"] == 0
    for name, weight in first.named_weights().items():
        assert torch.equal(weight, second.named_weights()[name])
    norms = [each.update(samples[1], iteration=1)["grad_norm"] for each in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0
    for name, weight in first.named_weights().items():
        assert torch.allclose(weight, second.named_weights()[name], atol=1e-6), name


def test_an_adapter_learns_as_a_whole_model(device: torch.device, tmp_path: Path) -> None:
    """In float32 as PEFT's formula in float64 has it; in bf16 beside a frozen bf16 base."""
    base, samples = save_model("llama", tmp_path / "base"), random_samples(12)
    start = trained_by_peft(base, "all-linear", tmp_path / "start")
    adapter = {"rank": 3, "alpha": 6.0, "from": str(start)}
    settings = SMOOTH | {"adapter": adapter, "epochs": 2, "learning_rate": 0.05}
    learner = on(device, make_learner(base, {"policy_loss": "policy_gradient"}, **settings))
    before = {name: each.clone() for name, each in learner.parallel.published.items()}
    learner.update(samples, iteration=0)
    expected, norms = plain_updates(base, start, samples, learner.config)
    found = learner.parallel.published
    assert_learnt(norms, before, found)
    for name, each in found.items():
        assert torch.allclose(each.cpu().double(), expected[name], atol=1e-4), name
    settings |= {"precision": "bf16", "compile": device.type == "cuda"}
    mixed = on(device, make_learner(base, **settings))
    kinds = {each.dtype for each in mixed.named_weights().values()}
    assert kinds == {torch.float32, torch.bfloat16}
    scores = mixed.score(samples)
    assert mixed.update(samples, iteration=0)["grad_norm"] > 1e-3
    assert any(
        (one != other).any() for one, other in zip(scores, mixed.score(samples), strict=True)
    )

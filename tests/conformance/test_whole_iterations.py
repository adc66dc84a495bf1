"""Two iterations of real runs against a float64 reference that shares no code with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from earl_core.config import RunConfig
from flows.debug import Debugged, opened_here
from tests.conformance.reference import STEPS, Reference
from tests.rollout.chat_models import CHATML, DROPS_REASONING, char_tokenizer

TEMPERATURE = 0.9
UPDATE = {
    "learning_rate": 2e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4,
    "max_grad_norm": 0.5,
}  # fmt: skip
NONE = {"placement": "none"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}},
        {"policy_loss": {"name": "ppo_clip", "clip_low": 0.01, "clip_high": 0.02},
         "advantage": {"name": "rloo"}, "aggregation": {"name": "token_mean"},
         "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.2}},
    ),
    "Qwen3": (
        {"head_dim": 16, "tie_word_embeddings": True},
        {"policy_loss": {"name": "cispo", "clip_high": 0.005},
         "advantage": {"name": "turn_returns"}, "kl": {"placement": "reward", "coefficient": 0.3},
         "aggregation": {"name": "sequence_mean_token_sum"}},
    ),
    "Gemma3Text": (
        {"head_dim": 16, "sliding_window": 256, "query_pre_attn_scalar": 16,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"policy_loss": {"name": "sapo", "tau_positive": 10.0, "tau_negative": 40.0},
         "advantage": {"name": "grpo"}, "aggregation": {"name": "sequence_mean_token_mean"},
         "kl": {"placement": "loss", "estimator": "k2", "coefficient": 0.2},
         "entropy_coefficient": 0.05},
    ),
    "Phi3": (
        {"sliding_window": None},
        {"policy_loss": {"name": "dppo", "mask_low": 0.001, "mask_high": 0.002},
         "advantage": {"name": "reinforce_plus_plus"}, "aggregation": {"name": "constant",
         "length": 18}, "kl": {"placement": "reward", "coefficient": 0.3}},
    ),
    "Granite": (
        {"logits_scaling": 0.4, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.2},
        {"policy_loss": {"name": "ppo_clip", "clip_low": 0.01, "clip_high": 0.02},
         "advantage": {"name": "rloo"}, "aggregation": {"name": "token_mean"},
         "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.2}},
    ),
    "Cohere2": (
        {"logit_scale": 1.5, "sliding_window": 256,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"policy_loss": {"name": "cispo", "clip_high": 0.005},
         "advantage": {"name": "turn_returns"}, "kl": {"placement": "reward", "coefficient": 0.3},
         "aggregation": {"name": "sequence_mean_token_sum"}},
    ),
    "Gemma2": (
        {"head_dim": 16, "sliding_window": 256, "query_pre_attn_scalar": 16,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"policy_loss": {"name": "ppo_clip", "clip_low": 0.005, "clip_high": 0.01},
         "advantage": {"name": "grpo"}, "aggregation": {"name": "sequence_mean_token_mean"},
         "kl": {"placement": "loss", "estimator": "k2", "coefficient": 0.2},
         "entropy_coefficient": 0.05},
    ),
    "GptOss": (
        {"head_dim": 16, "sliding_window": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"policy_loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.005},
         "advantage": {"name": "gigpo", "discount": 0.9}, "aggregation": {"name": "token_mean"},
         "kl": {"placement": "reward", "coefficient": 0.3}},
    ),
    "Mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"policy_loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.005},
         "advantage": {"name": "gigpo", "discount": 0.9}, "aggregation": {"name": "token_mean"},
         "kl": {"placement": "reward", "coefficient": 0.3}},
    ),
}  # fmt: skip


def save(family: str, more: dict[str, Any], directory: Path) -> Path:
    """A random model of two layers, whose attention is not uniform, and a tokenizer."""
    # Of half of the families the template rewrites what was answered.
    tokenizer = char_tokenizer(CHATML if family < "N" else DROPS_REASONING)
    torch.manual_seed(3)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**shape, **more})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim >= 2 else 1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_iterations_equal_the_reference(family: str, tmp_path: Path) -> None:
    shape, algorithm = FAMILIES[family]
    model = save(family, shape, tmp_path / "model")
    config = configured(model, algorithm, tmp_path, iterations=2)
    for metrics in equal_to_the_reference(config, model, tmp_path):
        assert algorithm["policy_loss"]["name"] == "sapo" or metrics["clip_fraction"] > 0.01


def equal_to_the_reference(
    config: dict[str, Any], model: Path, directory: Path, nats: float = 2e-5
) -> Iterator[dict[str, float]]:
    """The metrics of two updates, each after it was compared. nats: between the engine's log-probs
    and the reference's."""
    reference = Reference(model, config["algorithm"], UPDATE)
    with opened_here(RunConfig.model_validate(config), lambda *_: None) as controller:
        for number in range(2):
            manifests = Debugged(controller, number).whole()
            rows = pq.read_table(controller.run.episodes_path(number)).to_pylist()
            before = weights(reference.model)
            found = reference.iteration(rows, TEMPERATURE)
            ours = learnt(directory, number)
            theirs = weights(reference.model)
            metrics = manifests["update"].metrics
            assert metrics["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
            assert found["grad_norm"] > 0.05
            assert found["mismatch"] < nats
            assert found["moved"] > 0.005
            moved = max(float(np.abs(theirs[name] - before[name]).max()) for name in theirs)
            apart = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in theirs}
            assert moved > 1e-3
            assert max(apart.values()) < 1e-6, {n: v for n, v in apart.items() if v >= 1e-6}
            assert {len(row["turn_starts"]) for row in rows} <= {1, 2, 3}
            yield metrics


WAVES = (
    # Prompts, those that differ, waves, and the groups trained on that were played later.
    (range(0, 6), [1, 4], 3, 1),
    (range(6, 10), [6, 9], 2, 1),
)
"""Two iterations that want two groups: of five prompts the second and the last pay."""


@pytest.mark.parametrize("how", ["replace", "drop"])
def test_alike_groups_leave_as_a_filter_of_the_stream_has_it(how: str, tmp_path: Path) -> None:
    """The same prompts and seeds, filtered in a few lines: tokens, advantages, gradients and
    weights. The reference scores what is trained on, alone."""
    model = save("Llama", FAMILIES["Llama"][0], tmp_path / "model")
    algorithm = FAMILIES["Llama"][1]
    config = configured(model, algorithm, tmp_path, iterations=2)
    environment = {
        "name": "tests.conformance.letters:SomeLetters", "options": {"paying": [1, 4], "of": 5}
    }  # fmt: skip
    asked = {**config["rollout"], "alike_groups": how}
    config |= {"environment": environment, "rollout": asked}
    reference, played = Reference(model, algorithm, UPDATE), 0
    with opened_here(RunConfig.model_validate(config), lambda *_: None) as controller:
        for number, (prompts, differ, waves, later) in enumerate(WAVES):
            manifests = Debugged(controller, number).whole()
            rows = pq.read_table(controller.run.episodes_path(number)).to_pylist()
            if how == "drop":
                prompts, waves, later = range(played, played + 2), 1, 0
                differ = [prompt for prompt in prompts if prompt % 5 in (1, 4)]
            assert [row["prompt_id"] for row in rows] == sorted(3 * [*prompts])
            played = prompts.stop
            kept = filtered(rows, 2)
            assert sorted({row["group_id"] for row in kept}) == differ
            for stage in ("advantage", "reference"):
                entries = manifests[stage].shards
                written = sorted(row for entry in entries for row in entry.row_ids)
                assert written == [row["sample_id"] for row in kept], stage
            before = weights(reference.model)
            metrics = {
                name: value
                for stage in ("rollout", "advantage", "update")
                for name, value in manifests[stage].metrics.items()
            }
            counted = [metrics[f"groups_{name}"] for name in ("alike", "replaced", "trained")]
            assert counted == [len(prompts) - len(differ), later, len(differ)]
            assert metrics["waves"] == waves
            assert metrics["groups_dropped"] == 0
            if not differ:
                assert metrics["optimizer_steps"] == 0
                continue
            found = reference.iteration(kept, TEMPERATURE)
            assert metrics["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
            assert found["grad_norm"] > 0.05
            ours = learnt(tmp_path, number)
            theirs = weights(reference.model)
            assert max(float(np.abs(theirs[name] - before[name]).max()) for name in theirs) > 1e-3
            assert max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs) < 1e-6


def filtered(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The samples of the first groups whose episodes have different rewards."""
    rewards: dict[int, dict[int, float]] = {}
    for row in rows:
        rewards.setdefault(row["group_id"], {})[row["episode_id"]] = row["reward"]
    differ = [group for group, each in rewards.items() if len(set(each.values())) > 1][:most]
    return [row for row in rows if row["group_id"] in differ]


def learnt(directory: Path, iteration: int) -> dict[str, np.ndarray]:
    """The weights of a checkpoint."""
    policy = directory / f"runs/run/checkpoints/{iteration:06d}/policy"
    return weights(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32))


def configured(
    model: Path, algorithm: dict[str, Any], directory: Path, iterations: int
) -> dict[str, Any]:
    return {
        "name": "run",
        "iterations": iterations,
        "runs_directory": str(directory / "runs"),
        "model": {"path": str(model)},
        "environment": {"name": "tests.conformance.letters:Letters"},
        "rollout": {
            "engine": "torch", "dtype": "float32", "threads": 1, "max_turns": 3,
            "prompts_per_iteration": 2, "group_size": 3, "max_tokens_per_turn": 6,
            "temperature": TEMPERATURE,
        },
        "algorithm": algorithm,
        "update": {**UPDATE, "epochs": STEPS, "precision": "fp32", "threads": 1},
        "tracking": {"enabled": False},
        "dispatch": {"directory": str(directory / "shm")},
    }  # fmt: skip


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: each.detach().double().numpy().copy() for name, each in model.named_parameters()}

"""Activation checkpointing by rungs: same gradients, fewer bytes, no product computed twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.selector.model.activations import selective_layer_bytes
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.profile.profile_table import candidate_of_key, key_of
from tests.learner import fake_peaks
from tests.learner.helpers import random_samples, save_model
from tests.learner.launched import launch
from tests.learner.test_policy_learner import make_learner


class Computed(TorchDispatchMode):
    """How often each operator was computed inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.summands: Counter[int] = Counter()
        """Products of matrices by what each of their numbers sums."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function).removesuffix(".default")] += 1
        if function is torch.ops.aten.mm.default:
            self.summands[args[0].shape[1]] += 1
        return function(*args, **(kwargs or {}))


def samples() -> list[TrainingSample]:
    """Short ones, and two long ones that share their first 200 tokens."""
    long = random_samples(2, longest=300, seed=4, masked=False)
    made = []
    for sample in long:
        tokens = np.resize(long[0].tokens, 280 + sample.sample_id).astype(np.int32)
        tokens[200:] = (tokens[200:] + sample.sample_id) % 40
        columns = {
            name: np.resize(column, tokens.size)
            for name, column in vars(sample).items()
            if isinstance(column, np.ndarray)
        }
        columns["loss_mask"][0] = 0
        made.append(TrainingSample(**{**vars(sample), **columns, "tokens": tokens}))
    return [*made, *random_samples(3)]


def gradients(learner: PolicyLearner, given: list[TrainingSample]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    step = learner.optimizer.step

    def noting() -> None:
        for name, parameter in learner.parallel.trained.items():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
        step()

    learner.optimizer.step = noting  # type: ignore[method-assign]
    assert learner.update(given, iteration=0)["grad_norm"] > 0.1
    return found


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_every_rung_has_the_same_gradients(kind: str, tmp_path: Path) -> None:
    """Packed samples of one call and of several, a shared prefix, and a sliding window."""
    save_model(kind, tmp_path)
    given, found, computed = samples(), {}, {}
    for rung in ("none", "selective", "full"):
        learner = make_learner(
            tmp_path, activation_checkpointing=rung, max_tokens_per_microbatch=1024
        )
        with Computed() as seen:
            found[rung] = gradients(learner, given)
        computed[rung] = seen.counts
    for name, expected in found["none"].items():
        assert expected.abs().max() > 0, name
        assert torch.equal(found["selective"][name], expected), name
        assert torch.equal(found["full"][name], expected), name
    for kept in ("aten.mm", "aten.bmm", "aten._scaled_dot_product_flash_attention_for_cpu"):
        assert computed["selective"][kept] == computed["none"][kept]
        assert computed["full"][kept] > computed["none"][kept] or not computed["none"][kept]
    for again in ("aten.rsqrt", "aten.silu"):
        assert computed["selective"][again] == computed["full"][again] > computed["none"][again]


def test_only_the_product_of_a_pairs_b_is_computed_again(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    given, found, computed = samples(), {}, {}
    for rung in ("none", "selective"):
        learner = make_learner(
            tmp_path, adapter={"rank": 3}, activation_checkpointing=rung,
            max_tokens_per_microbatch=1024,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(5)
        for name, parameter in learner.parallel.trained.items():
            if name.endswith("lora_B"):
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
        with Computed() as seen:
            found[rung] = gradients(learner, given)
        computed[rung] = seen.summands
    for name, expected in found["none"].items():
        assert expected.abs().max() > 0, name
        assert torch.equal(found["selective"][name], expected), name
    again = computed["selective"] - computed["none"]
    # Under checkpointing transformers wants a gradient of the first layer's input, which goes
    # through query, key and value.
    assert again.total() - again[3] == 3 < again[3]


@pytest.mark.slow
def test_each_rung_takes_less_memory(tmp_path: Path) -> None:
    (peaks,) = launch("tests.learner.fake_peaks", "rungs", 1, tmp_path)
    assert peaks["none"][1] > 1.05 * peaks["selective"][1] > 1.1 * peaks["full"][1]
    shape = MODELS["qwen2.5-1.5b"]
    # Weights, gradients and moments of a layer in float32, halved by the shards.
    state = 16 * shape.layer_parameters / 2
    kept = (peaks["selective"][1] - peaks["selective"][0]) / 2 - state
    tokens = fake_peaks.RUNG_TOKENS
    assert kept / tokens == pytest.approx(selective_layer_bytes(shape, 1, mixed=True), rel=0.01)


def test_a_boolean_of_earlier_versions() -> None:
    with pytest.raises(ValueError, match="write full instead of true, or selective"):
        UpdateConfig(activation_checkpointing=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write none instead of false"):
        UpdateConfig(activation_checkpointing=False)  # type: ignore[arg-type]
    for stored, rung in ((True, "full"), (False, "none"), ("selective", "selective")):
        update = {"stage": "update", "activation_checkpointing": stored}
        plan = DeploymentPlan.model_validate(
            {"iteration": 0, "stages": {"update": update}, "reasons": {}}
        )
        assert plan["update"].activation_checkpointing == rung
        assert candidate_of_key(key_of(plan["update"]), 1) == plan["update"]
        assert DeploymentPlan.model_validate_json(plan.model_dump_json()) == plan

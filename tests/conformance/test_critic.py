"""Two iterations with a critic against a float64 reference that shares no code with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from earl_core.config import RunConfig
from earl_core.run.checkpoints import CRITIC_FOLDER
from flows.debug import Debugged, opened_here
from tests.conformance.reference import Critic, Reference
from tests.conformance.test_whole_iterations import (
    FAMILIES,
    TEMPERATURE,
    UPDATE,
    configured,
    learnt,
    save,
    weights,
)

ADVANTAGES: dict[str, dict[str, Any]] = {
    "token": {"name": "gae", "gamma": 0.9, "lambda": 0.8},
    "turn": {"name": "gae", "gamma": 0.9, "lambda": 0.8, "level": "turn"},
}


@pytest.mark.parametrize(
    ("family", "level", "kl"),
    [
        ("Llama", "token", "loss"),
        pytest.param("Qwen3", "turn", "reward", marks=pytest.mark.slow),
        pytest.param("Phi3", "token", "reward", marks=pytest.mark.slow),
    ],
)
def test_policy_and_critic_equal_the_reference(
    family: str, level: str, kl: str, tmp_path: Path
) -> None:
    """Of Phi-3 the template begins new samples within an episode; the critic's head of Qwen3 takes
    the place of a tied one."""
    model = save(family, FAMILIES[family][0], tmp_path / "model")
    algorithm = {
        **FAMILIES["Llama"][1],
        "advantage": ADVANTAGES[level],
        "kl": {"placement": kl, "estimator": "k3" if kl == "loss" else "k1", "coefficient": 0.2},
    }
    config = configured(model, algorithm, tmp_path, iterations=2)
    config |= {"critic": {"learning_rate": 3e-3, "clip": 0.02}}
    reference, critic = Reference(model, algorithm, UPDATE), Critic(model, UPDATE, 3e-3, 0.02)
    with opened_here(RunConfig.model_validate(config), lambda *_: None) as controller:
        for number in range(2):
            manifests = Debugged(controller, number).whole()
            rows = pq.read_table(controller.run.episodes_path(number)).to_pylist()
            before = [weights(each.model) for each in (reference, critic)]
            found = reference.iteration(rows, TEMPERATURE, critic)
            assert found["grad_norm"] > 0.05
            metrics = manifests["critic"].metrics
            assert metrics["grad_norm"] > 0.05
            assert metrics["clip_fraction"] > 0.01
            folder = controller.run.checkpoint_path(number) / CRITIC_FOLDER / "policy"
            both = learnt(tmp_path, number), load_file(folder / "model.safetensors")
            for learner, ours, was in zip((reference, critic), both, before, strict=True):
                theirs = weights(learner.model)
                assert ours.keys() == theirs.keys()
                assert max(float(np.abs(theirs[name] - was[name]).max()) for name in was) > 1e-3
                apart = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in theirs}
                assert max(apart.values()) < 1e-6, {n: v for n, v in apart.items() if v >= 1e-6}

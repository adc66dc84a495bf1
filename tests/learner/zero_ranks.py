"""Updates that leave out samples without advantage, beside ones that compute them: the batch, one
process, and what `test_zero_advantage` does in several ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)

from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.zero_advantage import leave_out
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.tensors.slices import local_part, slices_of
from tests.learner.cuts import meshes
from tests.learner.helpers import random_samples, save_model
from tests.learner.mesh_cases import model
from tests.learner.test_policy_learner import make_learner

ALIKE = (0, 1, 3, 4)
"""Groups without spread, of six."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token_mean": {"policy_loss": "ppo_clip"},
    "episodes": {"policy_loss": "policy_gradient", "aggregation": "sequence_mean_token_mean"},
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence_mean_token_sum"},
    "corrected": {
        "policy_loss": {"name": "ppo_clip", "dual_clip": 3.0},
        "importance_correction": {"level": "sequence"},
        "aggregation": {"name": "constant", "length": 64},
    },
}
SETTINGS = {"epsilon": 1e-2, "learning_rate": 0.01, "weight_decay": 0.1, "epochs": 2}
MINIBATCHES = {"one step": 1, "a group each": 6}


def batch() -> list[TrainingSample]:
    """Twelve episodes of two samples, whose turns have advantages of their own: most groups have no
    spread, and of one episode that has an advantage one sample has none."""
    made = []
    for sample in random_samples(24, samples_per_episode=2):
        advantages = sample.advantages.copy()
        if sample.group_id in ALIKE or sample.sample_id == 9:
            advantages[sample.loss_mask == 1] = 0.0
        elif sample.sample_id == 10:
            advantages[: np.flatnonzero(sample.loss_mask)[-1]] = 0.0
        made.append(dataclasses.replace(sample, advantages=advantages))
    return made


def updated(
    directory: Path,
    algorithm: str,
    minibatches: int,
    *,
    skip: bool,
    mesh: UpdateMesh | None = None,
) -> tuple[PolicyLearner, dict[str, float]]:
    """A learner of the directory's model after two updates with the batch, and the last one's
    metrics."""
    settings = SETTINGS | {"minibatches": minibatches}
    learner = make_learner(directory, ALGORITHMS[algorithm], mesh=mesh, **settings)
    for iteration in range(2):
        samples, skipped = batch(), None
        if skip:
            samples, skipped = leave_out(
                samples, whole_episodes=learner.whole_episodes, seed=0, iteration=iteration
            )
        replicas = learner.mesh.deployment.data_parallel
        own = [each for each in samples if each.group_id % replicas == learner.mesh.data_rank]
        metrics = learner.update(own, iteration=iteration, skipped=skipped)
    return learner, metrics


def state_of(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """This rank's parts of weights and moments."""
    found = {}
    for name, weight in learner.named_weights().items():
        found[f"weight {name}"] = local_part(weight).clone()
        for key, value in learner.optimizer.state[name].items():
            found[f"{key} {name}"] = value.clone()
    return found


CASES = (("token_mean", 1), ("gspo", 6))
"""Algorithms and minibatches that are tried on every mesh."""


def prepare(scratch: Path) -> None:
    """Write a model, and what one process computes where nothing is skipped."""
    save_model(model("llama"), scratch / "model")
    for name, count in CASES:
        learner, metrics = updated(scratch / "model", name, count, skip=False)
        assert metrics["grad_norm"] > 1e-3
        save_file(state_of(learner), scratch / f"{name}.safetensors")


def compare(scratch: Path) -> dict[str, float]:
    """The largest relative difference of each mesh's state from that, as `difference` has it."""
    torch.set_num_threads(1)
    found = {}
    for shape in meshes(int(os.environ["WORLD_SIZE"])):
        mesh = create_mesh(shape)
        for name, count in CASES:
            wanted = load_file(scratch.parent / f"{name}.safetensors")
            learner, metrics = updated(scratch.parent / "model", name, count, skip=True, mesh=mesh)
            assert metrics["skipped_tokens_share"] > 0.5
            boxes = {each.name: each.box for each in slices_of(learner.named_weights())}
            largest = 0.0
            for key, value in state_of(learner).items():
                kind, _, parameter = key.partition(" ")
                part = () if kind == "step" else boxes[parameter].index
                largest = max(largest, difference(wanted[key][part], value))
            found[f"{shape} {name}"] = largest
        mesh.close()
    return found


def difference(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest, relative to the numbers above 1."""
    assert wanted.shape == found.shape
    gap = (wanted - found).double().abs() / wanted.double().abs().clamp(min=1.0)
    return float(gap.max()) if gap.numel() else 0.0

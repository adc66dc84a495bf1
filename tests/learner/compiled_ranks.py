"""What `test_compiled_layers` does in several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.compiled_layers import layers_compiled
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.reshard import reshard
from earl_core.tensors.slices import local_part
from tests.learner.helpers import random_samples
from tests.learner.test_policy_learner import make_learner


def compare(scratch: Path) -> dict[str, Any]:
    """Updates with compiled layers and without: norms of gradients, and how far apart they are."""
    torch.set_num_threads(1)
    layout = StageDeployment("update", shard=2)
    learners = []
    for compiled in (False, True):
        learners.append(
            make_learner(
                scratch / "model",
                mesh=create_mesh(layout),
                precision="bf16",
                epsilon=1e-2,
                compile=compiled,
            )
        )
    gradients, differences = [], []
    for step in range(2):
        if step == 1:
            replicas = StageDeployment("update", replicas=2)
            for learner in learners:
                reshard(learner, replicas, learner.config)
        dealt = random_samples(8, seed=step, longest=20 + 30 * step)
        mesh = learners[0].mesh
        mine = [each for each in dealt if each.group_id % 2 == mesh.data_rank]
        plain, compiled_ = (learner.update(mine, iteration=0) for learner in learners)
        gradients.append(plain["grad_norm"])
        differences.append(abs(compiled_["grad_norm"] / plain["grad_norm"] - 1))
    compiled = layers_compiled(learners[1].model) and not layers_compiled(learners[0].model)
    for learner in learners:
        learner.mesh.close()
    return {"gradients": gradients, "differences": differences, "compiled": compiled}


def compare_tensor_parallel(scratch: Path) -> dict[str, Any]:
    """Four packs of different lengths on a mesh with two tensor ranks, with compiled layers and
    without: norms of gradients, how far apart numbers are, graphs compiled for the first pack and
    for all.
    """
    torch.set_num_threads(1)
    mesh = create_mesh(
        StageDeployment("update", shard=int(os.environ["WORLD_SIZE"]) // 2, tensor_parallel=2)
    )
    # A pack a step on every rank: what a rank computes for others has one trained token.
    settings = {"epsilon": 1e-2, "learning_rate": 0.01, "max_tokens_per_microbatch": 4096}
    plain, learner = (
        make_learner(scratch.parent / "model", mesh=mesh, compile=compiled, **settings)
        for compiled in (False, True)
    )
    gradients, differences, graphs = [], [], []
    for step in range(4):
        dealt = random_samples(8 * mesh.deployment.shard, seed=step + 1, longest=25 + 30 * step)
        mine = [each for each in dealt if each.group_id % mesh.deployment.shard == mesh.data_rank]
        both = plain, learner
        expected, found = (np.concatenate(each.score(mine)) for each in both)
        differences.append(float(np.abs(found - expected).max()))
        theirs, ours = (each.update(mine, iteration=0) for each in both)
        gradients.append(ours["grad_norm"])
        differences += [
            abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
            for name in ("loss", "grad_norm", "entropy")
        ]
        graphs.append(counters["stats"]["unique_graphs"])
    weights = plain.named_weights()
    differences += [
        float((local_part(each) - local_part(weights[name])).abs().max())
        for name, each in learner.named_weights().items()
    ]
    compiled = layers_compiled(learner.model) and not layers_compiled(plain.model)
    mesh.close()
    return {
        "gradients": gradients,
        "differences": differences,
        "compiled": compiled,
        "graphs": [graphs[0], graphs[-1]],
    }

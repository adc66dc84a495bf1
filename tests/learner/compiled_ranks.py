"""What `test_compiled_layers` does in several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.learner.compiled_layers import layers_compiled
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.reshard import reshard
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

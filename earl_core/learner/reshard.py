"""Another stage deployment for a live learner: its mesh, and what is said besides."""

from __future__ import annotations

import time

import torch

from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.parallel_model import ParallelModel, build_shell
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.state.reshard import Moved, move_state


def reshard(
    learner: PolicyLearner, deployment: StageDeployment, settings: UpdateConfig
) -> dict[str, float]:
    """Reshard the learner as the deployment says; weights and optimizer state stay, bit for bit.

    settings: the update's, as the deployment has them. Collective; the number of ranks stays.
    Returns the seconds it took, the bytes that this rank received, and the most memory it used
    beyond that of before and after. Raises ConfigError for a mesh that the model does not fit;
    the learner is then as it was.
    """
    began = time.perf_counter()
    old = learner.mesh
    parallel = learner.parallel
    moved = Moved({name: dict(state) for name, state in learner.optimizer.state.items()})
    if (deployment.axes, deployment.expert_axes) != (
        old.deployment.axes,
        old.deployment.expert_axes,
    ):
        new = create_mesh(deployment, old.hosts)
        try:
            shell = build_shell(parallel, new)
        except BaseException:
            new.close()
            raise
        moved = move_state(parallel.model, moved.state, shell.model, new)
        parallel = shell
    _take_settings(parallel, deployment, settings)
    learner.config = settings
    learner.optimizer.offload = deployment.offload_optimizer
    learner.adopt(parallel, moved.state)
    if parallel.mesh is not old:
        old.close()
    return {
        "seconds": time.perf_counter() - began,
        "moved_bytes": float(moved.moved_bytes),
        "peak_bytes": float(moved.peak_bytes),
    }


def _take_settings(
    parallel: ParallelModel, deployment: StageDeployment, settings: UpdateConfig
) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    parallel.module.scoring.chunk_tokens = deployment.logits_chunk_tokens or None

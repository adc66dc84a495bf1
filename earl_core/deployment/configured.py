"""The stage deployments that a run file asks for, with what all of its sections say of them."""

from __future__ import annotations

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config.rollout import RolloutConfig
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig


def configured(
    stages: StagesConfig, rollout: RolloutConfig, update: UpdateConfig, cores: int, iteration: int
) -> tuple[StageDeployment, StageDeployment]:
    """Those of rollout and update in an iteration. Threads that are not configured are the host's
    cores, divided as the placement says."""
    engines, mesh = stages.at(iteration)
    share = stages.placed.threads
    of_engine = rollout.threads // engines.tensor_parallel
    of_engine = of_engine or share(cores, "rollout", engines.ranks, mesh.ranks)
    of_rank = update.threads or share(cores, "update", engines.ranks, mesh.ranks)
    return (
        engines._replace(threads=of_engine, max_running_requests=rollout.max_running_requests),
        mesh._replace(
            threads=of_rank,
            max_tokens_per_microbatch=update.max_tokens_per_microbatch,
            activation_checkpointing=update.activation_checkpointing,
        ),
    )

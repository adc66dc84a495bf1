"""The stage deployments of rollout and update, and when they change: `stages`."""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import Field, field_validator, model_validator

from earl_core.deployment.placement import CheckedPlacement, Division, name_problem
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.system.settings import Settings


class _Stage(Settings):
    """A run file's section of a stage: some fields of its `StageDeployment`."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "replicate" in given:
            raise ValueError("`replicate` is called `replicas` now: rename it")
        return given


class RolloutStage(_Stage):
    """Engines of the rollout."""

    replicas: int = Field(
        default=1, ge=1, description="Number of engines, each with a copy of the weights."
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Tensor-parallel degree of each engine; above 1 with vllm only.",
    )

    @property
    def deployment(self) -> StageDeployment:
        """Without what other sections set."""
        return StageDeployment("rollout", **self.model_dump())


class UpdateStage(_Stage):
    """Mesh of the update."""

    replicas: int = Field(
        default=1,
        ge=1,
        description="Data-parallel replicas of the parameters, which see different samples.",
    )
    shard: int = Field(
        default=1,
        ge=1,
        description="Ranks that share one replica, its gradients and its optimizer state (FSDP).",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="Context-parallel degree: ranks that share the tokens of a microbatch.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="Tensor-parallel degree: ranks that share each matrix."
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="Data-parallel ranks of a host (`replicas` x `shard`) over which the experts "
        "of a mixture are divided, and to which tokens go; divides them, and takes no further "
        "ranks.",
    )
    offload_optimizer: bool = Field(
        default=False, description="Keep the optimizer state in the host's memory; GPUs only."
    )
    logits_chunk_tokens: int = Field(
        default=0,
        ge=0,
        description="Positions whose logits exist at the same time; 0: as memory allows.",
    )

    @model_validator(mode="after")
    def _experts_are_divided_over_data_ranks(self) -> UpdateStage:
        degree, ranks = self.expert_parallel, self.replicas * self.shard
        if degree > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"expert_parallel {degree} beside tensor_parallel {self.tensor_parallel} is not "
                "supported: set tensor_parallel to 1, and use shard or context_parallel instead"
            )
        if ranks % degree:
            working = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ValueError(
                f"expert_parallel {degree} does not divide the {ranks} data-parallel ranks "
                f"(replicas {self.replicas} x shard {self.shard}): use {working}"
            )
        return self

    @property
    def deployment(self) -> StageDeployment:
        """Without what other sections set."""
        return StageDeployment("update", **self.model_dump())


class StageChange(Settings):
    """From `iteration` on, a stage named here has exactly this stage deployment; what the entry
    leaves out of it is at its default. A stage not named keeps what it has."""

    iteration: int = Field(
        ge=1, description="First iteration with these deployments, counted from 0."
    )
    rollout: RolloutStage | None = Field(
        default=None, description="Engines from that iteration on; null: as before."
    )
    update: UpdateStage | None = Field(
        default=None, description="Mesh of the update from that iteration on; null: as before."
    )

    @model_validator(mode="after")
    def _changes_something(self) -> StageChange:
        if self.rollout is None and self.update is None:
            raise ValueError(
                f"the change at iteration {self.iteration} names no stage: give it `rollout` or "
                "`update`, or remove it"
            )
        return self


class StagesConfig(Settings):
    """Parallelism of the stages under the selector's policy `fixed`. The reference model has the
    update's stage deployment."""

    placement: str | None = Field(
        default=None,
        description="colocated: rollout and update use the same devices in turn. separate: each "
        "has devices of its own. shared: both use the same devices at the same time, whose memory "
        "must hold both. An import path package.module:object: your own. null: colocated, or with "
        "schedule.staleness and selector.policy "
        "`live_tokens` as the selector chooses.",
    )
    rollout: RolloutStage | None = Field(
        default=None,
        description="Engines of the rollout. null: engines on all GPUs, each on the fewest that "
        "hold the weights and a fair KV cache; without GPUs one engine.",
    )
    update: UpdateStage | None = Field(
        default=None,
        description="Mesh of the update. null: a rank on every GPU, where the GPUs of a host "
        "share one replica of the parameters, or all GPUs where a host does not hold one; "
        "without GPUs one rank.",
    )
    changes: tuple[StageChange, ...] = Field(
        default=(), description="Other deployments from given iterations on, in ascending order."
    )

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, value: str | None) -> str | None:
        if value is not None and (problem := name_problem(value)):
            raise ValueError(problem)
        return value

    @field_validator("changes")
    @classmethod
    def _ascending(cls, value: tuple[StageChange, ...]) -> tuple[StageChange, ...]:
        for before, after in itertools.pairwise(value):
            if after.iteration <= before.iteration:
                raise ValueError(
                    f"the change at iteration {after.iteration} stands after the one at "
                    f"{before.iteration}: list them by ascending iteration, one for each"
                )
        return value

    @property
    def division(self) -> Division:
        """The division of the devices, unless the selector chooses one."""
        return Division(placement=self.placement or "colocated")

    @property
    def placed(self) -> CheckedPlacement:
        """Its placement. Raises `ConfigError` for one of one's own that cannot be imported."""
        return self.division.placed

    def at(self, iteration: int) -> tuple[StageDeployment | None, StageDeployment | None]:
        """Return the deployments of rollout and update in one iteration, without the settings of
        other sections; None where the run file leaves it open."""
        rollout, update = self.rollout, self.update
        for change in self.changes:
            if change.iteration <= iteration:
                rollout, update = change.rollout or rollout, change.update or update
        return rollout.deployment if rollout else None, update.deployment if update else None

    def since(self, iteration: int, stage: str) -> int:
        """The iteration since which the stage is deployed as in this one; 0: the beginning."""
        named = [c.iteration for c in self.changes if getattr(c, stage) is not None]
        return max((k for k in named if k <= iteration), default=0)

    def steps(self) -> list[tuple[str, int]]:
        """Every iteration that begins with other ones, after the key that brings them about."""
        changes = enumerate(self.changes)
        return [("stages", 0), *((f"stages.changes.{n}", c.iteration) for n, c in changes)]

    def check_rollout(self, engine: str, prompts: int) -> None:
        """Raise `ValueError` for engines that the rollout's settings rule out."""
        for key, iteration in self.steps():
            rollout, _ = self.at(iteration)
            if rollout is None:
                continue
            if rollout.tensor_parallel > 1 and engine != "vllm":
                raise ValueError(
                    f"{key}.rollout.tensor_parallel is {rollout.tensor_parallel}, but rollout."
                    f"engine {engine!r} runs on one device: choose `vllm`, or set it to 1"
                )
            if rollout.replicas > prompts:
                raise ValueError(
                    f"{key}.rollout.replicas ({rollout.replicas}) exceeds rollout."
                    f"prompts_per_iteration ({prompts}): some engines would stand idle"
                )

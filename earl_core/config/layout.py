"""How rollout and update are laid out over the devices, and when that changes: `layout`."""

from __future__ import annotations

import itertools

from pydantic import Field, field_validator, model_validator

from earl_core.cluster.placement import PLACEMENTS, Placement
from earl_core.config.rollout import RolloutConfig
from earl_core.config.settings import Settings
from earl_core.config.update import UpdateConfig


class RolloutLayout(Settings):
    """Engines that play side by side, each with tensor parallelism of its own."""

    replicas: int = Field(
        default=1, ge=1, description="Engines; each plays a share of the prompts."
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="Devices of each engine; above 1 with rollout.engine vllm."
    )

    @property
    def devices(self) -> int:
        """Devices of all engines together."""
        return self.replicas * self.tensor_parallel

    @property
    def text(self) -> str:
        """Such as `2 engines` or `1 engine x tensor_parallel 2`."""
        engines = f"{self.replicas} engine{'s' if self.replicas > 1 else ''}"
        parallel = f" x tensor_parallel {self.tensor_parallel}"
        return engines + (parallel if self.tensor_parallel > 1 else "")


class UpdateLayout(Settings):
    """The mesh of ranks that train: replicate x shard x context_parallel x tensor_parallel."""

    replicate: int = Field(default=1, ge=1, description="Copies of the parameters.")
    shard: int = Field(default=1, ge=1, description="Ranks that share one copy (FSDP).")
    context_parallel: int = Field(default=1, ge=1, description="Ranks that share each sample.")
    tensor_parallel: int = Field(default=1, ge=1, description="Ranks that share each layer.")
    offload_optimizer: bool = Field(
        default=False, description="Optimizer state in the host's memory; for GPUs."
    )
    logits_chunk_tokens: int | None = Field(
        default=None, ge=1, description="Positions whose logits exist at a time; none means all."
    )

    @property
    def ranks(self) -> int:
        """Processes of the mesh, a device each."""
        return self.replicate * self.shard * self.context_parallel * self.tensor_parallel

    @property
    def text(self) -> str:
        """Such as `1 rank` or `4 ranks (replicate 2 x tensor_parallel 2)`."""
        names = ("replicate", "shard", "context_parallel", "tensor_parallel")
        degrees = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        text = f"{self.ranks} ranks ({' x '.join(degrees)})" if degrees else "1 rank"
        text += f", logits by {self.logits_chunk_tokens}" if self.logits_chunk_tokens else ""
        return text + (", optimizer offloaded" if self.offload_optimizer else "")


class LayoutChange(Settings):
    """From `iteration` on, a stage named here has exactly this layout; what the entry leaves out of
    it is at its default. A stage not named keeps its layout."""

    iteration: int = Field(ge=1)
    rollout: RolloutLayout | None = None
    update: UpdateLayout | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> LayoutChange:
        if self.rollout is None and self.update is None:
            raise ValueError(
                f"the change at iteration {self.iteration} names no stage: give it `rollout` or "
                "`update`, or remove it"
            )
        return self

    @property
    def text(self) -> str:
        """Such as `update 2 ranks (tensor_parallel 2)`."""
        named = {"rollout": self.rollout, "update": self.update}
        return ", ".join(f"{stage} {layout.text}" for stage, layout in named.items() if layout)


class LayoutConfig(Settings):
    """What the policy `fixed` carries out. The reference is laid out as the update."""

    placement: str = Field(
        default="colocated",
        description="colocated: rollout and update use the same devices in turn. separate: each "
        "has its own.",
    )
    rollout: RolloutLayout = RolloutLayout()
    update: UpdateLayout = UpdateLayout()
    changes: tuple[LayoutChange, ...] = Field(
        default=(), description="Other layouts from given iterations on, ascending."
    )

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, value: str) -> str:
        if value not in PLACEMENTS:
            raise ValueError(
                f"there is no placement {value!r}: choose from {', '.join(PLACEMENTS)}"
            )
        return value

    @field_validator("changes")
    @classmethod
    def _ascending(cls, value: tuple[LayoutChange, ...]) -> tuple[LayoutChange, ...]:
        for before, after in itertools.pairwise(value):
            if after.iteration <= before.iteration:
                raise ValueError(
                    f"the change at iteration {after.iteration} stands after the one at "
                    f"{before.iteration}: list them by ascending iteration, one for each"
                )
        return value

    @property
    def placed(self) -> Placement:
        """The placement by its name."""
        return PLACEMENTS[self.placement]

    def at(self, iteration: int) -> tuple[RolloutLayout, UpdateLayout]:
        """The layouts of one iteration."""
        rollout, update = self.rollout, self.update
        for change in self.changes:
            if change.iteration <= iteration:
                rollout, update = change.rollout or rollout, change.update or update
        return rollout, update

    def since(self, iteration: int, stage: str) -> int:
        """The iteration since which the stage has the layout of this one; 0: the beginning."""
        named = [c.iteration for c in self.changes if getattr(c, stage) is not None]
        return max((k for k in named if k <= iteration), default=0)

    def steps(self) -> list[tuple[str, int]]:
        """Every iteration that begins with other layouts, after the key that brings them about."""
        changes = enumerate(self.changes)
        return [("layout", 0), *((f"layout.changes.{n}", c.iteration) for n, c in changes)]

    def threads(
        self, rollout: RolloutConfig, update: UpdateConfig, cores: int, iteration: int
    ) -> tuple[int, int]:
        """CPU threads of each device of an engine and of each rank of the update: as configured,
        else the cores divided as the placement says."""
        engines, mesh = self.at(iteration)
        of_engine = rollout.threads // engines.tensor_parallel
        share = self.placed.threads
        return (
            max(1, of_engine or share(cores, "rollout", engines.devices, mesh.ranks)),
            update.threads or share(cores, "update", engines.devices, mesh.ranks),
        )

    def check_rollout(self, engine: str, prompts: int) -> None:
        """Raise `ValueError` for engines that the rollout's settings rule out."""
        for key, iteration in self.steps():
            rollout, _ = self.at(iteration)
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

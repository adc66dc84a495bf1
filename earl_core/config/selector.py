"""Settings of the selector: the `selector` section of a run file."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from earl_core.config.rollout import RolloutConfig
from earl_core.config.stages import StagesConfig
from earl_core.deployment.stages import STAGES, Selectable
from earl_core.system.import_path import is_foreign
from earl_core.system.settings import Place, Settings

VARIABLE_FIELDS = (
    "rollout.replicas",
    "rollout.tensor_parallel",
    "rollout.max_running_requests",
    "update.replicas",
    "update.tensor_parallel",
    "update.context_parallel",
    "update.shard",
    "update.max_tokens_per_microbatch",
    "update.activation_checkpointing",
    "update.logits_chunk_tokens",
    "update.offload_optimizer",
)
"""Fields that a choice may move. `reference` and `critic` follow `update`."""


class SelectorConfig(Settings):
    """Policy and thresholds of the Parallelism Selector.

    `auto` is one of the others, decided when a run begins (`earl_core.control.selector_policy`):
    until then nothing is moved. `fixed` changes nothing; `average_context` is the rule of the EARL
    paper (rollout only, by the mean context); `live_tokens` takes the least predicted iteration
    time over all stages.
    """

    policy: Literal["auto", "fixed", "average_context", "live_tokens"] = Field(
        default="auto",
        description="auto: live_tokens where there are several devices to lay stages out on (of "
        "cores: once they were measured), the run file names no layout and asks for no equal bits, "
        "else fixed; the run keeps what it began with. "
        "fixed: `stages` decides, and rules fill in what it leaves open. "
        "average_context: the rollout follows the mean context length. live_tokens: the "
        "deployments with the least predicted time of an iteration, over all stages.",
    )
    stages: tuple[Selectable, ...] = Field(
        default=get_args(Selectable),
        min_length=1,
        description="live_tokens only: stages whose deployment it chooses; the others stay as "
        "under `fixed`.",
    )
    hysteresis: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description="Least gain for a switch, as a share of the iteration time; load statistics "
        "that change by less count as noise.",
    )
    expected_stay: int = Field(
        default=8,
        ge=1,
        description="Iterations that a deployment is expected to stay, over which the cost of a "
        "switch is spread.",
    )
    forecast: int = Field(
        default=3,
        ge=0,
        description="Iterations ahead for which a choice must still fit into memory.",
    )
    memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the devices' memory that the training stages may use.",
    )
    switch_seconds: float = Field(
        default=30.0,
        ge=0,
        description="Assumed cost of rebuilding a worker group, until one was measured.",
    )
    half_life: float = Field(
        default=16.0, gt=0, description="Iterations after which a measurement counts half."
    )
    tensor_parallel: tuple[int, ...] = Field(
        default=(),
        description="Tensor-parallel degrees that rollouts may use; none: every legal one.",
    )
    profiled_requests: int | None = Field(
        default=None,
        ge=1,
        description="average_context only: sequences of an engine at which its context ranges "
        "were measured.",
    )
    fixed_fields: tuple[str, ...] = Field(
        default=(),
        description="Fields that the selector leaves as configured, such as `update.shard`.",
    )
    profile_directory: Place = Field(
        default="profiles",
        min_length=1,
        description="Directory to which `earl profile` writes its measurements and from which "
        "runs read them; relative to the working directory.",
    )

    @field_validator("fixed_fields")
    @classmethod
    def _known_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in VARIABLE_FIELDS:
                raise ValueError(
                    f"selector.fixed_fields names {name!r}, which no policy moves: choose from "
                    f"{', '.join(VARIABLE_FIELDS)}"
                )
        return value

    @field_validator("tensor_parallel")
    @classmethod
    def _degrees(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(degree < 1 for degree in value) or len(set(value)) != len(value):
            raise ValueError(
                f"selector.tensor_parallel must list different degrees of 1 or more, not {value}"
            )
        return value

    @model_validator(mode="after")
    def _policy_uses_them(self) -> SelectorConfig:
        if self.policy in ("auto", "fixed"):
            unused = [n for n in ("fixed_fields", "tensor_parallel") if getattr(self, n)]
            if unused:
                raise ValueError(
                    f"selector.{unused[0]} means nothing under selector.policy `fixed`, which "
                    "moves nothing and which `auto` may become: remove it, or choose `live_tokens`"
                )
        if self.profiled_requests is not None and self.policy != "average_context":
            raise ValueError(
                "selector.profiled_requests is read by selector.policy `average_context` only: "
                "remove it, or choose that policy"
            )
        return self

    @property
    def moves(self) -> tuple[str, ...]:
        """The stages that the policy lays out."""
        moved = {"auto": (), "fixed": (), "average_context": ("rollout",)}
        return moved.get(self.policy, self.stages)

    def divides(self, given: Any, staleness: int) -> bool:
        """Tell whether the division of the devices between rollout and training is a choice.

        given: a run's configuration, or a selection's input.
        """
        free = given.stages.placement in (None, "separate")
        return staleness > 0 and free and self._lays_out_all(given)

    def _lays_out_all(self, given: Any) -> bool:
        """Tell whether it lays out every stage that takes part in ranks of its own."""
        own = (name for name in get_args(Selectable) if STAGES[name].takes_part(given))
        roles = {name: STAGES[name].done_by(given) for name in own}
        wanted = {name for name, role in roles.items() if role == STAGES[name].role}
        return self.policy == "live_tokens" and wanted <= set(self.moves)

    def check_stages(self, stages: StagesConfig, given: Any, staleness: int) -> None:
        """Raise `ValueError` for stage deployments that leave the policy nothing to move.

        given: the run's configuration.
        """
        if self.policy in ("auto", "fixed"):
            return
        if stages.changes:
            raise ValueError(
                f"stages.changes and selector.policy {self.policy!r} both say when stage "
                "deployments change: remove the changes, or set selector.policy to `fixed`"
            )
        if stages.division.placement == "colocated":
            return
        if is_foreign(stages.division.placement):
            raise ValueError(
                f"stages.placement {stages.placement!r} is one of your own, of which no other "
                "selector.policy than `fixed` predicts anything: set it to `fixed`"
            )
        if not staleness or not self._lays_out_all(given):
            raise ValueError(
                f"stages.placement {stages.placement!r} is for selector.policy `live_tokens` only "
                "where schedule.staleness is above 0 and selector.stages has all stages: set it to "
                "`colocated`, or selector.policy to `fixed`"
            )

    def check_rollout(self, rollout: RolloutConfig) -> None:
        """Raise `ValueError` for settings that the rollout's make meaningless."""
        if rollout.engine == "torch" and any(degree > 1 for degree in self.tensor_parallel):
            raise ValueError(
                "selector.tensor_parallel lists degrees above 1, but rollout.engine `torch` runs "
                "on one device: choose `vllm`, or list 1 only"
            )
        requests, limit = self.profiled_requests, rollout.max_running_requests
        if requests is not None and requests > limit:
            raise ValueError(
                f"selector.profiled_requests ({requests}) exceeds rollout.max_running_requests "
                f"({limit}): no engine runs as many"
            )

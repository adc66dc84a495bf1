"""The selector's input, the trend of its statistics, and the plan that moves the context alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression
from typing import Any

from pydantic import Field

from earl_core.config.critic import CriticConfig
from earl_core.config.feasibility import configured
from earl_core.config.rollout import RolloutConfig
from earl_core.config.run import RunConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.services import ExperienceConfig
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan, Forbidden
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE, STAGES
from earl_core.selector.model.calibration import Calibration
from earl_core.selector.model.default_deployments import usual_engines, usual_mesh
from earl_core.selector.profile.profile_table import ProfileTable
from earl_core.system.settings import Settings
from earl_core.system.shared_memory import VERSIONS


class Statistics(Settings):
    """Statistics of the last finished iterations; every series has its newest value last. Contexts
    in tokens of an episode, waits and switches in seconds."""

    context_mean: tuple[float, ...] = ()
    context_max: tuple[float, ...] = ()
    turns_mean: tuple[float, ...] = ()
    generated_share: tuple[float, ...] = Field(
        default=(), description="Part of an episode's tokens that the model wrote."
    )
    tool_wait_seconds: tuple[float, ...] = Field(default=(), description="Mean of one answer's.")
    left_out_share: tuple[float, ...] = Field(
        default=(), description="Part of the asked episodes' tokens that the update left out."
    )
    played_share: tuple[float, ...] = Field(
        default=(),
        description="Prompts that were played, in waves, over those that were asked for.",
    )
    switch_seconds: dict[str, float] = Field(
        default_factory=dict, description="Last measured rebuild of a stage's worker group."
    )
    reshard_seconds: dict[str, float] = Field(
        default_factory=dict, description="Last measured move of live ranks to another mesh."
    )


WINDOW = 8
"""Iterations that a trend is taken from."""


def forecast(series: Sequence[float], steps: int, noise: float) -> float:
    """The value `steps` iterations after the newest, never below the newest.

    A least-squares line through the last `WINDOW` values; its slope counts only when it explains a
    change over the window larger than any noise of ±noise/2 around a level could (1.5 · noise).
    Growth alone is forecast: a plan that is too large for shrinking contexts still works.
    """
    recent = series[-WINDOW:]
    if len(recent) < 3:
        return float(recent[-1]) if recent else 0.0
    slope = linear_regression(range(len(recent)), recent).slope
    if slope * (len(recent) - 1) <= 1.5 * noise * fmean(recent):
        return float(recent[-1])
    return recent[-1] + slope * steps


class SelectionInput(Settings):
    """Everything that a choice depends on; sealed beside the plan, so that it can be replayed.

    attempt: how often the iteration's choice was made before, because a stage was infeasible.
    current: the plan that the running worker groups follow. forbidden: what ran out of memory in
    this run. reference_models: those that the reference stage holds; none: the model itself.
    reserved_bytes: by stage, bytes that others hold while it runs: of the host on CPU hosts, where
    nothing is given back between stages, else of a GPU, where sleepers keep their libraries; others
    were not measured. context_overflow: the most tokens that an engine of this run was built too
    small for. weight_versions: sets of published weights that are there at a time. staleness,
    streams, groups_replayed: of the run's schedule. barrier_share: of all iterations, those whose
    rollout no engine begins before all have ended the one before. policy_reason: why `auto` is the
    policy; empty: it was named. keeps_division: devices do not change sides, because rollouts of
    later iterations play already.

    A worked example, a 7B model on 8 GPUs after episodes of at most 8,000 tokens, then 100,000:

        >>> from earl_core.selector.choice.policy import select
        >>> given = SelectionInput(
        ...     rollout=RolloutConfig(prompts_per_iteration=16, group_size=8, max_turns=20),
        ...     selector=SelectorConfig(policy="live_tokens"),
        ...     hardware=Hardware(
        ...         cpu_cores=64, memory_bytes=10**12, gpus=8, gpu_memory_bytes=80 * 10**9,
        ...         gpu_name="NVIDIA H100 80GB HBM3",
        ...     ),
        ...     model=ModelShape(
        ...         model_type="qwen2", hidden_size=3584, intermediate_size=18944, layers=28,
        ...         attention_heads=28, key_value_heads=4, vocabulary=152064,
        ...         max_positions=131072,
        ...     ),
        ...     statistics=Statistics(context_mean=(4800.0,), context_max=(8000.0,)),
        ... )
        >>> select(given)["update"].label
        'TP 1, shard 8, 8 threads, microbatch 8192'
        >>> longer = Statistics(context_mean=(60000.0,), context_max=(100000.0,))
        >>> select(given.model_copy(update={"statistics": longer}))["update"].label
        'TP 1, shard 8, 8 threads, microbatch 100352, checkpointing'
    """

    iteration: int = Field(default=0, ge=0)
    attempt: int = Field(default=0, ge=0)
    rollout: RolloutConfig
    experience: ExperienceConfig = ExperienceConfig()
    update: UpdateConfig = UpdateConfig()
    stages: StagesConfig = StagesConfig()
    needs_reference: bool = False
    critic: CriticConfig | None = None
    hardware: Hardware
    model: ModelShape
    reference_models: tuple[ModelShape, ...] = ()
    statistics: Statistics = Statistics()
    current: DeploymentPlan | None = None
    selector: SelectorConfig = SelectorConfig()
    profile: ProfileTable = ProfileTable()
    calibration: Calibration = Calibration()
    forbidden: tuple[Forbidden, ...] = ()
    reserved_bytes: dict[str, float] = Field(default_factory=dict)
    context_overflow: float = Field(default=0.0, ge=0)
    weight_versions: int = VERSIONS
    staleness: int = Field(default=0, ge=0)
    streams: bool = False
    groups_replayed: int = Field(default=0, ge=0)
    barrier_share: float = Field(default=0.0, ge=0, le=1)
    policy_reason: str = ""
    keeps_division: bool = False
    iterations_left: int | None = Field(default=None, ge=1)

    @classmethod
    def of(
        cls, config: RunConfig, hardware: Hardware, model: ModelShape, **seen: Any
    ) -> SelectionInput:
        """Make the input of a run. seen: the other fields, as far as there is something to say."""
        sections = ("rollout", "experience", "update", "critic", "stages", "selector")
        own = {name: getattr(config, name) for name in (*sections, "needs_reference")}
        adapter = config.model.adapter
        trained = model.with_adapter(adapter.shape) if adapter else model
        own |= {"hardware": hardware, "model": trained}
        schedule = config.schedule
        own |= {"weight_versions": schedule.versions, "streams": schedule.streams}
        if schedule.replay is not None:
            prompts = config.rollout.prompts_per_iteration
            own["groups_replayed"] = schedule.replay.groups(prompts)
        return cls(**{**own, "staleness": schedule.staleness, **seen})

    @property
    def divides(self) -> bool:
        """Whether the division of the devices is a choice."""
        return self.selector.divides(self, self.staleness)

    def chosen(self, stage: str) -> bool:
        """Tell whether the stage takes part, in ranks of its own."""
        return STAGES[stage].takes_part(self) and self.in_ranks_of(stage) == stage

    def in_ranks_of(self, stage: str) -> str:
        """The stage by which the ranks that do this one are laid out: itself, but that a critic
        says its values where it is trained, and the update's ranks score with the frozen model
        where they train an adapter beside it."""
        return STAGES[stage].done_by(self)

    @property
    def reference_joins(self) -> bool:
        """True when the one reference is the base of an adapter, which the update's ranks hold."""
        return self.model.adapter is not None and not self.reference_models

    def models_of(self, stage: str) -> tuple[ModelShape, ...]:
        """The models that a stage's ranks compute with."""
        if STAGES[stage].role == "critic":
            return (self.model.as_critic,)
        return (self.reference_models if stage == "reference" else ()) or (self.model,)

    def shape_of(self, stage: str) -> ModelShape:
        """The largest of them."""
        return max(self.models_of(stage), key=lambda each: each.parameters)

    def settings_of(self, stage: str) -> UpdateConfig:
        """The settings by which a stage's model is trained."""
        if stage != "critic" or self.critic is None:
            return self.update
        return self.critic.settings(self.update)

    def steps_of(self, stage: str) -> int:
        """Parts in which a stage goes through the episodes: optimizer steps, or one."""
        return 1 if STAGES[stage].scores else self.settings_of(stage).minibatches

    def configured(self) -> tuple[StageDeployment, StageDeployment]:
        """Deployments of rollout and update that the configuration names for the iteration."""
        return configured(
            self.stages, self.rollout, self.update, self.hardware, self.iteration, self._usual()
        )

    def leaves_open(self, stage: str) -> bool:
        """Tell whether the stage is spread over the GPUs because the run file leaves it open."""
        given = self.stages.at(self.iteration)[0 if stage == "rollout" else 1]
        return given is None and self.hardware.gpus > 0

    def _usual(self) -> tuple[StageDeployment, StageDeployment] | None:
        """Return the deployments of the stages that the run file leaves open; None without GPUs."""
        if not self.hardware.gpus:
            return None
        fewest = self.hardware.fewest_hosts or self.hardware.hosts
        taken = [
            each.ranks * self.hardware.hosts // fewest if each else None
            for each in self.stages.at(self.iteration)
        ]
        sides = self.stages.placed.sides(self.hardware.gpus, *taken)
        engines, ranks = (max(1, len(side)) for side in sides)
        minibatch = self.rollout.episodes_per_iteration // self.update.minibatches
        mesh = StageDeployment(
            "update",
            # Where this is open, smaller microbatches are taken before copies span hosts.
            max_tokens_per_microbatch=self.update.tokens_per_microbatch(gpu=False),
            activation_checkpointing=self.update.activation_checkpointing,
        )
        return (
            usual_engines(self.model, self.hardware, self.rollout, engines),
            usual_mesh(self.model, self.hardware, mesh, ranks, minibatch),
        )


def fixed_plan(given: SelectionInput) -> DeploymentPlan:
    """Every stage as configured, with the iteration's entry of `stages.changes`."""
    rollout, update = given.configured()
    length, length_reason = model_length(given)
    experience, why = _experience(given.experience)
    stages = {
        "rollout": rollout._replace(max_model_len=length),
        "experience": experience,
        "update": update,
    }
    reasons = {
        "rollout": f"{rollout.label}: {_configured(given, 'rollout')}; {length_reason}",
        "experience": why,
        "update": f"{update.label}: {_configured(given, 'update')}",
    }
    for name in SELECTABLE:
        if name in stages or not STAGES[name].takes_part(given):
            continue
        stages[name] = update._replace(stage=name)
        home = given.in_ranks_of(name)
        if home != name:
            reasons[name] = _IN_RANKS_OF[home]
        elif STAGES[name].scores:
            # A frozen model has no optimizer whose state could be moved away.
            stages[name] = stages[name]._replace(offload_optimizer=False)
            reasons[name] = "as the update, which has the same forward pass"
        else:
            reasons[name] = "as the update, which has the same work with another head"
    return DeploymentPlan(
        iteration=given.iteration, stages=stages, reasons=reasons, attempt=given.attempt
    )


_IN_RANKS_OF = {
    "update": "in the update's ranks, without the adapter's pairs: no second model is held",
    "critic": "in the critic's ranks, which hold it",
}


def _configured(given: SelectionInput, stage: str) -> str:
    since, placement = given.stages.since(given.iteration, stage), given.stages.division.placement
    if given.leaves_open(stage):
        part = "all" if placement == "colocated" else "its part of the"
        return f"spread over {part} {given.hardware.gpus} GPUs, as `stages` leaves it open"
    text = f"as configured from iteration {since} on" if since else "as configured"
    apart = "" if placement == "colocated" else f", {placement}"
    return text + apart


def _experience(config: ExperienceConfig) -> tuple[StageDeployment, str]:
    """Return the deployment of rewards and advantages, and its reason; it does not change."""
    if config.ranks == 1:
        why = "1 process: rewards and advantages are a few bytes per episode"
    else:
        why = f"{config.ranks} processes, each for the groups it holds: as configured"
    return StageDeployment("experience", config.ranks), why


def model_length(given: SelectionInput, expected: float = 0.0) -> tuple[int, str]:
    """The context that engines are built for, and why. expected: tokens of the longest episode that
    the forecast sees; the longest that was played or that an engine had no room for counts too."""
    seen = max(*given.statistics.context_max, given.context_overflow, 0.0)
    longest = max(seen, expected)
    limit = given.model.max_positions
    asked = min(given.rollout.max_model_len or limit, limit)
    if given.current is not None:
        asked = max(asked, given.current["rollout"].max_model_len)
    length = asked
    # Doubling keeps rebuilds rare while contexts grow; 80 % leaves room for one iteration more.
    while longest > 0.8 * length and length < limit:
        length = min(2 * length, limit)
    if length > asked:
        text = f"{CONTEXT_RAISED}{asked} to {length}: episodes reached {seen:.0f} tokens"
        if longest > seen:
            text += f" and are expected to reach {longest:.0f}"
        return length, text
    return length, f"context {length}: the longest episode had {seen:.0f} tokens"


CONTEXT_RAISED = "context raised from "
"""Beginning of a reason's clause that says why the engines' context became longer."""

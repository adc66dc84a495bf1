"""The whole configuration of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from pydantic import Field, field_validator, model_validator

from earl_core.algorithms.mismatch import MismatchWatch
from earl_core.config.algorithm import INITIAL, AlgorithmConfig, PenaltyConfig
from earl_core.config.combinations import (
    check_algorithm,
    check_balance,
    check_critic,
    check_curriculum,
    check_deal,
    check_drafts,
    check_groups,
    check_labels,
    check_sizes,
    check_stream,
    needs_zero_advantage,
)
from earl_core.config.critic import CriticConfig
from earl_core.config.environment import (
    CurriculumConfig,
    EnvironmentConfig,
    MixedEnvironment,
    RowCurriculumConfig,
)
from earl_core.config.guard import Guard, check_guard
from earl_core.config.imitation import ImitationConfig
from earl_core.config.model import ModelConfig
from earl_core.config.refusal import check_no_secrets
from earl_core.config.reward import RewardConfig
from earl_core.config.rollout import RolloutConfig
from earl_core.config.schedule import ScheduleConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.services import (
    CheckpointConfig,
    ClusterConfig,
    DeadlineConfig,
    DispatchConfig,
    EvaluationConfig,
    ExperienceConfig,
    TrackingConfig,
)
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig
from earl_core.system.settings import Place, Settings

KEPT_ANCESTOR = "ancestor"
"""The folder of a run directory that holds a copy of its ancestor's model."""

KEPT_ADAPTER = "adapter"
"""Likewise of the adapter that it began with."""

KEPT_REFERENCES = "references"
"""Likewise of the frozen models that its KL penalties name."""

_RESERVED = r"prefect|mlartifacts|mlruns|mlflow\.db(-.*)?"
"""Names that Prefect and MLflow keep beside the runs; SQLite adds files such as `mlflow.db-wal`."""


class RunConfig(Settings):
    """One training run: what `earl train FILE` reads.

    Raises `pydantic.ValidationError` for unknown keys, wrong values and combinations that
    cannot work; `earl_core.config.load.load_config` turns that into one readable `ConfigError`.
    """

    name: str = Field(
        description="Name of the run and of its directory: up to 100 letters, digits, `.`, `_`, "
        "`-`."
    )
    seed: int = Field(
        default=0,
        description="Random seed of the run; every random draw derives from it and from its "
        "place in the run.",
    )
    iterations: int = Field(
        ge=1, description="Number of training iterations, after which the run is finished."
    )
    runs_directory: Place = Field(
        default="runs",
        description="Directory in which the run's directory is made; relative to the working "
        "directory.",
    )
    model: ModelConfig = Field(description="The initial policy.")
    environment: EnvironmentConfig | None = Field(
        default=None,
        description="The environment or agent to train on; null where `environments` names "
        "several.",
    )
    environments: tuple[MixedEnvironment, ...] = Field(
        default=(),
        description="Several environments that share the prompts, instead of one `environment`.",
    )
    curriculum: CurriculumConfig | None = Field(
        default=None,
        description="Rule by which the shares of the `environments` follow the spread of their "
        "returns; None: their weights alone decide.",
    )
    imitation: ImitationConfig | None = Field(
        default=None,
        description="First iterations that imitate demonstrations, by cross entropy; None: all "
        "iterations play episodes.",
    )
    rollout: RolloutConfig = Field(description="Sampling of episodes: engine, batch size, budgets.")
    cluster: ClusterConfig = Field(
        default=ClusterConfig(), description="The hosts of the run; by default this machine."
    )
    reward: RewardConfig = Field(
        default=RewardConfig(),
        description="Functions that score episodes besides the environment; by default none.",
    )
    experience: ExperienceConfig = Field(
        default=ExperienceConfig(),
        description="Processes that compute rewards and advantages; by default one.",
    )
    algorithm: AlgorithmConfig = Field(
        default=AlgorithmConfig(),
        description="Advantage estimator, policy loss and KL penalty; by default GRPO with PPO's "
        "clipped loss and no KL penalty.",
    )
    critic: CriticConfig | None = Field(
        default=None, description="The critic that an estimator such as gae asks; None: none."
    )
    update: UpdateConfig = Field(
        default=UpdateConfig(),
        description="Optimizer, precision and batch sizes of the policy update.",
    )
    stages: StagesConfig = Field(
        default=StagesConfig(),
        description="Parallelism of rollout and update; by default all GPUs are used.",
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(),
        description="Overlap of iterations; by default each begins when the one before has ended.",
    )
    selector: SelectorConfig = Field(
        default=SelectorConfig(),
        description="The Parallelism Selector; by default it moves what nobody has laid out.",
    )
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(),
        description="Held-out evaluation during training; by default none.",
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(),
        description="Intervals of checkpoints, and the number that is kept.",
    )
    guard: Guard = Field(
        default="warn",
        description="Consequence of poisoned rewards and a collapse. off: nobody looks. warn: "
        "findings are told. act: episodes leave, the run becomes cautious, and goes back.",
    )
    dispatch: DispatchConfig = Field(
        default=DispatchConfig(), description="Shared memory for the data that stages pass on."
    )
    tracking: TrackingConfig = Field(
        default=TrackingConfig(), description="Tracking in MLflow, and the episodes that are kept."
    )
    deadlines: DeadlineConfig = Field(
        default=DeadlineConfig(),
        description="Time limits in seconds, and repeats after lost workers.",
    )

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "layout" in given:
            raise ValueError("the section `layout` is called `stages` now: rename it")
        return given

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
            raise ValueError(
                f"name {value!r} cannot be a directory: use letters, digits, `.`, `_` and `-`"
            )
        if re.fullmatch(_RESERVED, value):
            raise ValueError(
                f"name {value!r} is taken: runs_directory holds something else of that name; "
                "choose another"
            )
        return value

    @model_validator(mode="after")
    def _no_secrets(self) -> RunConfig:
        check_no_secrets(self.model_dump(mode="json"))
        return self

    @model_validator(mode="after")
    def _environments(self) -> RunConfig:
        if bool(self.environments) == bool(self.environment):
            raise ValueError("give either environment, or the list environments")
        if self.environments and self.evaluation.options:
            raise ValueError(
                "evaluation.options are for one environment: give evaluation.suites instead"
            )
        if self.curriculum is not None:
            check_curriculum(len(self.environments), self.rollout.group_size)
        check_labels("environments", [each.title for each in self.environments])
        check_labels("evaluation.suites", [each.label for each in self.evaluation.suites])
        self.reward.check_environments(
            {
                label: self.own_weight(label) != 0
                or (self.needs_reference and self.penalty(label).coefficient > 0)
                for label in self.played
            }
        )
        scored_by = {suite.label: suite.scored_by for suite in self.evaluation.suites}
        self.reward.check_run(scored_by, self.deadlines.stage)
        return self

    @model_validator(mode="after")
    def _imitation(self) -> RunConfig:
        if self.imitation is not None:
            self.imitation.check(self.iterations, self.minibatches(0), self.demonstrations)
        return self

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        rollout, update, adapter = self.rollout, self.update, self.model.adapter is not None
        problem = needs_zero_advantage(self.algorithm)
        if problem and update.zero_advantage == "skip":
            raise ValueError(
                f"update.zero_advantage is `skip`, but {problem}, which gives samples without an "
                "advantage a gradient: set it to `compute`, or leave it out"
            )
        check_sizes(rollout, update)
        check_guard(self.guard, self.checkpoint.keep_last)
        charged = any(self.penalty(label).coefficient for label in self.played)
        corrected = check_algorithm(self.algorithm, rollout.group_size, charged)
        sizes, imitates = (self.iterations, rollout.prompts_per_iteration), bool(self.imitation)
        check_critic(self.critic, self.algorithm, *sizes, adapter=adapter, imitates=imitates)
        weights = {label: self.own_weight(label) for label in self.played}
        check_groups(self.algorithm, rollout, self.reward.unrewarded(weights))
        check_deal(rollout, self.tracking.keep_episodes)
        check_balance(self.algorithm, self.model, rollout)
        check_drafts(rollout, self.update.deterministic, adapter)
        self.schedule.check(self.iterations, corrected, rollout.prompts_per_iteration)
        if self.schedule.streams:
            check_stream(rollout, imitates)
        self.stages.check_rollout(rollout.engine, rollout.prompts_per_iteration)
        self.selector.check_rollout(rollout)
        self.selector.check_stages(self.stages, self, self.schedule.staleness)
        return self

    @property
    def initial_model(self) -> ModelConfig:
        """The model of policy version 0, as the run's processes load it: what the run began with
        has a copy in its directory."""
        run, model = Path(self.runs_directory, self.name), self.model
        if model.ancestor is not None:
            model = model.at(run / KEPT_ANCESTOR / "model")
        pairs = run / KEPT_ADAPTER / "model"
        return model.beginning_with(pairs) if pairs.is_dir() else model

    @property
    def divides(self) -> bool:
        """True where the selector divides the devices between rollout and training."""
        return self.selector.divides(self, self.schedule.staleness)

    @property
    def references(self) -> tuple[str, ...]:
        """The frozen models that score the episodes, as the settings name them, each once."""
        if not self.needs_reference:
            return ()
        charged = (self.penalty(label) for label in self.played)
        return tuple(dict.fromkeys(each.reference for each in charged if each.coefficient))

    @property
    def reference_joins(self) -> bool:
        """True when the one reference is what an adapter began with: the update's ranks hold it."""
        return self.model.adapter is not None and self.references == (INITIAL,)

    def penalty(self, label: str) -> PenaltyConfig:
        """The KL penalty of an environment's episodes."""
        own = self.mixture[label].kl if label in self.mixture else None
        return self.algorithm.kl if own is None else own

    @property
    def one_penalty(self) -> bool:
        """True when all episodes have the same KL penalty, or none has any."""
        return all(self.penalty(label) == self.algorithm.kl for label in self.played)

    def own_weight(self, label: str) -> float:
        """The weight of an environment's own reward."""
        given = self.mixture[label].reward_weight if label in self.mixture else None
        return self.reward.environment_weight if given is None else given

    @property
    def gates(self) -> tuple[str, ...]:
        """Labels of the suites that a checkpoint must not fall behind in to be the best one."""
        return tuple(each.label for each in self.evaluation.suites if each.gate)

    def reference_model(self, text: str) -> ModelConfig:
        """One of the `references`, as the run's processes load it."""
        own = self.initial_model
        if text != INITIAL:
            return own.whole(self.teacher(text) / "model")
        begun_with_pairs = own.adapter is not None and own.adapter.source is not None
        return own if begun_with_pairs else own.whole(own.path)

    def teacher(self, text: str) -> Path:
        """The folder of the run directory for a reference that is not the initial policy."""
        folder = xxhash.xxh3_64_hexdigest(text.encode())
        return Path(self.runs_directory, self.name, KEPT_REFERENCES, folder)

    @property
    def played(self) -> Mapping[str, EnvironmentConfig]:
        """Environments that are trained on, by label; a single environment has none."""
        return self.mixture if self.environment is None else {"": self.environment}

    @property
    def mixture(self) -> dict[str, MixedEnvironment]:
        """Several environments by label; empty where there is one."""
        return {each.title: each for each in self.environments}

    @property
    def row_curricula(self) -> dict[str, RowCurriculumConfig]:
        """Rules that choose rows, by the labels of the environments that have one."""
        rules = {label: each.curriculum for label, each in self.played.items()}
        return {label: rule for label, rule in rules.items() if rule is not None}

    @property
    def draws_by_returns(self) -> bool:
        """True when the prompts of an iteration depend on what earlier ones have returned."""
        return self.curriculum is not None or bool(self.row_curricula)

    @property
    def evaluated(self) -> Mapping[str, EnvironmentConfig]:
        """Environments that the held-out episodes are played in, by label."""
        if self.environment is None:
            return {label: each.held_out({}) for label, each in self.played.items()}
        return {"": self.environment.held_out(self.evaluation.options)}

    def evaluates(self, version: int) -> bool:
        """True when this policy version is evaluated; the first and the last always are, so that
        the curve has both ends."""
        every = self.evaluation.every
        return bool(every) and (version % every == 0 or version == self.iterations)

    def imitates(self, iteration: int) -> bool:
        """True for an iteration that learns from demonstrations and plays no episode."""
        return self.imitation is not None and iteration < self.imitation.iterations

    def played_before(self, iteration: int) -> int:
        """Count the iterations before this one that played episodes."""
        imitating = 0 if self.imitation is None else self.imitation.iterations
        return max(0, iteration - imitating)

    def minibatches(self, iteration: int) -> int:
        """Optimizer steps of an epoch of an iteration's update."""
        own = self.imitation.minibatches if self.imitation and self.imitates(iteration) else None
        return own or self.update.minibatches

    @property
    def demonstrations(self) -> int:
        """Demonstrations of an iteration that imitates."""
        given = self.imitation and self.imitation.episodes_per_iteration
        return given or self.rollout.episodes_per_iteration

    @property
    def needs_reference(self) -> bool:
        """True when a frozen model must score the episodes."""
        return self.algorithm.kl.placement != "none"

    @property
    def mismatch_watch(self) -> MismatchWatch:
        """Judge of the difference between the engine's log-probs and the trainer's."""
        exact = self.rollout.dtype == "float32" and self.update.precision == "fp32"
        return MismatchWatch(exact, self.rollout.temperature, self.update.max_mismatch)

    @property
    def skips_zero_advantage(self) -> bool:
        """True when nothing is computed of samples without an advantage."""
        return self.update.zero_advantage != "compute" and not needs_zero_advantage(self.algorithm)

    @property
    def needs_old_logprobs(self) -> bool:
        """True when the trainer scores the episodes before its first optimizer step."""
        steps = self.update.epochs * self.update.minibatches
        return self.algorithm.weighing is not None or (
            steps > 1 and not self.algorithm.from_rollout
        )

"""The whole configuration of a run, and when two executions of a stage are the same.

The key that a stage's sealed manifest must carry covers the run, the iteration, the stage, the data
of its inputs and the settings that the table of stages names. It never covers how the stage was
laid out on the hardware: a plan may change between a failure and the resume, and what was finished
stays finished.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.mismatch import MismatchWatch
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.environment import (
    CurriculumConfig,
    EnvironmentConfig,
    MixedEnvironment,
)
from earl_core.config.model import ModelConfig
from earl_core.config.refusal import check_no_secrets
from earl_core.config.reward import RewardConfig
from earl_core.config.rollout import RolloutConfig
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
from earl_core.deployment.stages import STAGE_SETTINGS, stage_of
from earl_core.system.files import canonical_json
from earl_core.system.settings import Place, Settings

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
    update: UpdateConfig = Field(
        default=UpdateConfig(),
        description="Optimizer, precision and batch sizes of the policy update.",
    )
    stages: StagesConfig = Field(
        default=StagesConfig(),
        description="Parallelism of rollout and update; by default all GPUs are used.",
    )
    selector: SelectorConfig = Field(
        default=SelectorConfig(),
        description="The Parallelism Selector; by default `stages` alone decides.",
    )
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(),
        description="Held-out evaluation during training; by default none.",
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(),
        description="Intervals of checkpoints, and the number that is kept.",
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
        if self.curriculum and (len(self.environments) < 2 or self.rollout.group_size < 2):
            raise ValueError(
                "curriculum divides the prompts among several environments by how the episodes of "
                "a group differ: give two environments or more and a group_size of at least 2, or "
                "leave it out"
            )
        for what, titles in (
            ("environments", [each.title for each in self.environments]),
            ("evaluation.suites", [each.label for each in self.evaluation.suites]),
        ):
            twice = sorted({title for title in titles if titles.count(title) > 1})
            if twice:
                raise ValueError(f"{what} have the label {twice[0]!r} twice: give each its own")
        self.reward.check_environments(self.played)
        for suite in self.evaluation.suites:
            self.reward.check_suite(suite.label, suite.scored_by)
        return self

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        algorithm, rollout = self.algorithm, self.rollout
        estimator = ADVANTAGE_ESTIMATORS.checked(algorithm.advantage)
        loss = POLICY_LOSSES.checked(algorithm.policy_loss)
        problem = self._needs_zero_advantage
        if problem and self.update.zero_advantage == "skip":
            raise ValueError(
                f"update.zero_advantage is `skip`, but {problem}, which gives samples without an "
                "advantage a gradient: set it to `compute`, or leave it out"
            )
        AGGREGATIONS.checked(algorithm.aggregation)
        KL_ESTIMATORS.checked({"name": algorithm.kl.estimator})
        if estimator is not None and estimator.needs_groups and rollout.group_size < 2:
            raise ValueError(
                f"algorithm.advantage {algorithm.advantage['name']!r} compares the episodes of a "
                f"group, so rollout.group_size must be at least 2, not {rollout.group_size}; "
                "`reinforce` and `reinforce_plus_plus` work with 1"
            )
        if estimator is not None and rollout.filters_groups and not estimator.needs_groups:
            raise ValueError(
                f"rollout.alike_groups is `{rollout.alike_groups}`, but algorithm.advantage "
                f"{algorithm.advantage['name']!r} does not compare the episodes of a group, so "
                "groups that score alike teach it as much as others: leave alike_groups out, or "
                "choose an estimator of groups, such as `grpo`"
            )
        if loss is not None and loss.from_rollout and algorithm.importance_correction is not None:
            raise ValueError(
                f"algorithm.policy_loss {algorithm.policy_loss['name']!r} corrects for the "
                "engine's log-probs itself, so algorithm.importance_correction would do it twice: "
                "leave it out"
            )
        if (algorithm.kl.placement == "none") != (algorithm.kl.coefficient == 0.0):
            raise ValueError(
                "algorithm.kl.placement and algorithm.kl.coefficient contradict each other: set "
                "placement to `loss` or `reward` and a positive coefficient, or neither"
            )
        turn, microbatch = rollout.max_tokens_per_turn, self.update.max_tokens_per_microbatch
        if turn is not None and microbatch is not None and turn > microbatch:
            raise ValueError(
                f"update.max_tokens_per_microbatch ({microbatch}) is smaller than "
                f"rollout.max_tokens_per_turn ({turn}): raise the first, or leave it out"
            )
        if self.update.minibatches > rollout.prompts_per_iteration:
            raise ValueError(
                f"update.minibatches ({self.update.minibatches}) exceeds "
                f"rollout.prompts_per_iteration ({rollout.prompts_per_iteration}): each minibatch "
                "needs a prompt of its own"
            )
        self.stages.check_rollout(rollout.engine, rollout.prompts_per_iteration)
        self.selector.check_rollout(rollout)
        self.selector.check_stages(self.stages)
        return self

    @property
    def played(self) -> Mapping[str, EnvironmentConfig]:
        """Environments that are trained on, by label; a single environment has none."""
        return self.mixture if self.environment is None else {"": self.environment}

    @property
    def mixture(self) -> dict[str, MixedEnvironment]:
        """Several environments by label; empty where there is one."""
        return {each.title: each for each in self.environments}

    @property
    def evaluated(self) -> Mapping[str, EnvironmentConfig]:
        """Environments that the held-out episodes are played in, by label."""
        if self.environment is None:
            return self.played
        options = {**self.environment.options, **self.evaluation.options}
        return {"": self.environment.model_copy(update={"options": options})}

    @property
    def needs_reference(self) -> bool:
        """True when the frozen initial policy must score the episodes."""
        return self.algorithm.kl.placement != "none"

    @property
    def mismatch_watch(self) -> MismatchWatch:
        """Judge of the difference between the engine's log-probs and the trainer's."""
        return MismatchWatch(self._all_float32, self.rollout.temperature, self.update.max_mismatch)

    @property
    def _all_float32(self) -> bool:
        return self.rollout.dtype == "float32" and self.update.precision == "fp32"

    @property
    def skips_zero_advantage(self) -> bool:
        """True when nothing is computed of samples without an advantage."""
        return self.update.zero_advantage != "compute" and not self._needs_zero_advantage

    @property
    def _needs_zero_advantage(self) -> str:
        """The setting by which samples without an advantage may have a gradient; empty: none."""
        algorithm = self.algorithm
        if algorithm.kl.placement == "loss":
            return "algorithm.kl.placement is `loss`"
        if algorithm.entropy_coefficient:
            return "algorithm.entropy_coefficient is not 0"
        loss = POLICY_LOSSES.checked(algorithm.policy_loss)
        if loss is None or loss.zero_without_advantage:
            return ""
        return f"algorithm.policy_loss is {algorithm.policy_loss['name']!r}"

    @property
    def needs_old_logprobs(self) -> bool:
        """True when the trainer scores the episodes before its first optimizer step."""
        steps = self.update.epochs * self.update.minibatches
        return steps > 1 or self.algorithm.importance_correction is not None


_SUPERVISION = (
    "hosts",
    "deterministic",
    "tool_timeout_seconds",
    "step_timeout_seconds",
    "start_timeout_seconds",
    "call_timeout_seconds",
    "episode_timeout_seconds",
)
"""Settings of an environment that decide how it is supervised, not what is played."""


def stage_key(
    config: RunConfig, uid: str, iteration: int, stage: str, inputs: Sequence[str]
) -> str:
    """sha256 in hex; `inputs` are the data digests of the input manifests, in order."""
    content = [uid, iteration, stage, list(inputs), stage_settings(config, stage)]
    return hashlib.sha256(canonical_json(content)).hexdigest()


def stage_settings(config: RunConfig, stage: str) -> dict[str, Any]:
    """The settings that a stage's result depends on, by dotted name."""
    names = STAGE_SETTINGS[stage_of(stage)]
    whole = config.model_dump(mode="json", include={name.partition(".")[0] for name in names})
    suites = whole.get("evaluation", {}).get("suites", ())
    for played in (whole.get("environment"), *whole.get("environments", ()), *suites):
        for name in _SUPERVISION if played else ():
            del played[name]
    # Keys of runs that were begun before a setting existed stay as they are.
    update, rollout = whole.get("update", {}), whole.get("rollout", {})
    if update.get("zero_advantage") is None:
        update.pop("zero_advantage", None)
    if not config.rollout.filters_groups:
        rollout.pop("alike_groups", None)
    if config.rollout.alike_groups != "replace":
        rollout.pop("max_waves", None)
    return {name: look_up(whole, name) for name in names}


def look_up(mapping: dict[str, Any], dotted: str) -> Any:
    """The setting of this dotted name."""
    value: Any = mapping
    for part in dotted.split("."):
        value = value[part]
    return value

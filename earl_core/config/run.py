"""The whole configuration of a run."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.mismatch import MismatchWatch
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.refusal import check_no_secrets
from earl_core.config.rollout import EnvironmentConfig, RolloutConfig
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
from earl_core.config.settings import Settings
from earl_core.config.stages import StagesConfig
from earl_core.config.update import UpdateConfig

_RESERVED = r"prefect|mlartifacts|mlruns|mlflow\.db(-.*)?"
"""What Prefect and MLflow keep beside the runs; SQLite adds files such as `mlflow.db-wal`."""


class RunConfig(Settings):
    """One training run: what `earl train FILE` reads.

    Raises `pydantic.ValidationError` for unknown keys, wrong values and combinations that
    cannot work; `earl_core.config.load.load_config` turns that into one readable `ConfigError`.
    """

    name: str = Field(description="Also the name of the run directory.")
    seed: int = 0
    iterations: int = Field(ge=1, description="Iterations after which the run is finished.")
    runs_directory: str = "runs"
    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig
    cluster: ClusterConfig = ClusterConfig()
    experience: ExperienceConfig = ExperienceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    update: UpdateConfig = UpdateConfig()
    stages: StagesConfig = StagesConfig()
    selector: SelectorConfig = SelectorConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    dispatch: DispatchConfig = DispatchConfig()
    tracking: TrackingConfig = TrackingConfig()
    deadlines: DeadlineConfig = DeadlineConfig()

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
    def _combinations(self) -> RunConfig:
        algorithm, rollout = self.algorithm, self.rollout
        estimator = ADVANTAGE_ESTIMATORS.build(algorithm.advantage)
        POLICY_LOSSES.build(algorithm.policy_loss)
        AGGREGATIONS.build(algorithm.aggregation)
        KL_ESTIMATORS.build(algorithm.kl.estimator)
        if estimator.needs_groups and rollout.group_size < 2:
            raise ValueError(
                f"algorithm.advantage {algorithm.advantage['name']!r} compares the episodes of a "
                f"group, so rollout.group_size must be at least 2, not {rollout.group_size}; "
                "`reinforce` and `reinforce_plus_plus` work with 1"
            )
        if (algorithm.kl.placement == "none") != (algorithm.kl.coefficient == 0.0):
            raise ValueError(
                "algorithm.kl.placement and algorithm.kl.coefficient contradict each other: set "
                "placement to `loss` or `reward` and a positive coefficient, or neither"
            )
        if self.model.float32_head and self._all_float32:
            raise ValueError(
                "model.float32_head changes nothing where rollout.dtype is float32 and "
                "update.precision fp32: leave it out"
            )
        budget = rollout.max_tokens_per_turn
        if budget is not None and budget > self.update.max_tokens_per_microbatch:
            raise ValueError(
                f"update.max_tokens_per_microbatch ({self.update.max_tokens_per_microbatch}) is "
                f"smaller than rollout.max_tokens_per_turn ({budget}): raise the first"
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
    def needs_reference(self) -> bool:
        """Whether the frozen initial policy must score the episodes."""
        return self.algorithm.kl.placement != "none"

    @property
    def mismatch_watch(self) -> MismatchWatch:
        """What judges the difference between the engine's log-probs and the trainer's."""
        return MismatchWatch(self._all_float32, self.rollout.temperature, self.update.max_mismatch)

    @property
    def _all_float32(self) -> bool:
        return self.rollout.dtype == "float32" and self.update.precision == "fp32"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the trainer scores the episodes before its first optimizer step."""
        steps = self.update.epochs * self.update.minibatches
        return steps > 1 or self.algorithm.importance_correction is not None

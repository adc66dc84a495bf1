"""What the selector sees and what it answers: `select(SelectionInput) -> DeploymentPlan`."""

from __future__ import annotations

from pydantic import Field

from earl_core.config.base import Settings
from earl_core.config.rollout import RolloutConfig
from earl_core.config.update import UpdateConfig
from earl_core.selector.deployment import DeploymentPlan, StageDeployment


class Hardware(Settings):
    """The devices that the stages may use."""

    cpu_cores: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)
    gpus: int = Field(default=0, ge=0)
    gpu_memory_bytes: int = Field(default=0, ge=0)
    gpu_name: str = ""


class ModelShape(Settings):
    """The numbers of a model's configuration that decide memory and legal degrees."""

    model_type: str
    hidden_size: int
    layers: int
    attention_heads: int
    key_value_heads: int
    vocabulary: int
    max_positions: int


class Statistics(Settings):
    """What the last finished iterations showed, newest last."""

    iterations: tuple[int, ...] = ()
    context_mean: tuple[float, ...] = ()
    context_max: tuple[float, ...] = ()
    live_tokens_max: tuple[float, ...] = ()
    rollout_tokens_per_second: tuple[float, ...] = ()
    update_tokens_per_second: tuple[float, ...] = ()


class SelectionInput(Settings):
    """Everything that a choice depends on; sealed beside the plan, so that it can be replayed."""

    iteration: int = Field(ge=0)
    rollout: RolloutConfig
    update: UpdateConfig
    needs_reference: bool
    hardware: Hardware
    model: ModelShape
    statistics: Statistics = Statistics()
    current: DeploymentPlan | None = None


def select(given: SelectionInput) -> DeploymentPlan:
    """The plan for one iteration. Pure: equal inputs give equal plans, no I/O, no clock.

    One rank for every stage; the rollout's context length is the one field that moves: it is
    doubled before the longest episode seen would reach it, up to the model's position range.
    """
    cores = given.hardware.cpu_cores
    length, length_reason = _model_len(given)
    engine_threads = given.rollout.threads or cores
    update_threads = given.update.threads or cores
    update = StageDeployment(
        stage="update",
        threads=update_threads,
        max_tokens_per_microbatch=given.update.max_tokens_per_microbatch,
        activation_checkpointing=given.update.activation_checkpointing,
    )
    stages = {
        "rollout": StageDeployment(
            stage="rollout",
            threads=engine_threads,
            max_model_len=length,
            max_running_requests=given.rollout.max_running_requests,
        ),
        "experience": StageDeployment(stage="experience"),
        "update": update,
    }
    reasons = {
        "rollout": f"1 engine x {engine_threads} threads: the one layout known; {length_reason}",
        "experience": "1 process: rewards and advantages are a few bytes per episode",
        "update": f"1 rank x {update_threads} threads, microbatches of at most "
        f"{update.max_tokens_per_microbatch} tokens: as configured",
    }
    if given.needs_reference:
        stages["reference"] = update.model_copy(update={"stage": "reference"})
        reasons["reference"] = "laid out as the update, which has the same forward pass"
    return DeploymentPlan(iteration=given.iteration, stages=stages, reasons=reasons)


def _model_len(given: SelectionInput) -> tuple[int, str]:
    limit = given.model.max_positions
    asked = min(given.rollout.max_model_len or limit, limit)
    if given.current is not None:
        asked = max(asked, given.current["rollout"].max_model_len or 0)
    seen = max(given.statistics.context_max, default=0.0)
    length = asked
    # Doubling keeps rebuilds rare while contexts grow; 80 % leaves room for one iteration more.
    while seen > 0.8 * length and length < limit:
        length = min(2 * length, limit)
    if length > asked:
        return (
            length,
            f"context raised from {asked} to {length}: episodes reached {seen:.0f} tokens",
        )
    return length, f"context {length}: the longest episode had {seen:.0f} tokens"

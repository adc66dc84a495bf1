"""What the selector sees, and the plan that moves nothing but the context length."""

from __future__ import annotations

from pydantic import Field

from earl_core.config.experience import ExperienceConfig
from earl_core.config.layout import LayoutConfig
from earl_core.config.rollout import RolloutConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.settings import Settings
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import DeploymentPlan, Forbidden, StageDeployment
from earl_core.selector.choice.statistics import Statistics
from earl_core.selector.model.memory_model import Calibration
from earl_core.selector.profile.profile_table import ProfileTable


class SelectionInput(Settings):
    """Everything that a choice depends on; sealed beside the plan, so that it can be replayed.

    attempt: how often the iteration's choice was made before, because a stage was infeasible.
    current: the plan that the running worker groups follow. forbidden: what ran out of memory in
    this run. reserved_bytes: by stage, bytes of the host that others hold while it runs (on CPU
    hosts, where nothing is given back between stages). context_overflow: the most tokens that an
    engine of this run was built too small for. trained_share: part of the parameters that has
    gradients (1 without adapters).
    """

    iteration: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    rollout: RolloutConfig
    experience: ExperienceConfig = ExperienceConfig()
    update: UpdateConfig
    layout: LayoutConfig = LayoutConfig()
    needs_reference: bool
    hardware: Hardware
    model: ModelShape
    statistics: Statistics = Statistics()
    current: DeploymentPlan | None = None
    selector: SelectorConfig = SelectorConfig()
    profile: ProfileTable = ProfileTable()
    calibration: Calibration = Calibration()
    forbidden: tuple[Forbidden, ...] = ()
    reserved_bytes: dict[str, float] = Field(default_factory=dict)
    context_overflow: float = Field(default=0.0, ge=0)
    iterations_left: int | None = Field(default=None, ge=1)
    trained_share: float = Field(default=1.0, gt=0, le=1)


def fixed_plan(given: SelectionInput) -> DeploymentPlan:
    """Every stage as configured, with the iteration's entry of `layout.changes`."""
    layout = given.layout
    engines, mesh = layout.at(given.iteration)
    length, length_reason = model_length(given)
    cores = given.hardware.cpu_cores
    engine_threads, rank_threads = layout.threads(
        given.rollout, given.update, cores, given.iteration
    )
    update = StageDeployment(
        stage="update",
        replicas=mesh.replicate,
        shard=mesh.shard,
        context_parallel=mesh.context_parallel,
        tensor_parallel=mesh.tensor_parallel,
        threads=rank_threads,
        max_tokens_per_microbatch=given.update.max_tokens_per_microbatch,
        activation_checkpointing=given.update.activation_checkpointing,
        logits_chunk_tokens=mesh.logits_chunk_tokens,
        offload_optimizer=mesh.offload_optimizer,
    )
    stages = {
        "rollout": StageDeployment(
            stage="rollout",
            replicas=engines.replicas,
            tensor_parallel=engines.tensor_parallel,
            threads=engine_threads,
            max_model_len=length,
            max_running_requests=given.rollout.max_running_requests,
        ),
        "experience": experience_deployment(given.experience),
        "update": update,
    }
    reasons = {
        "rollout": f"{engines.text} x {_threads(engine_threads)}: {_configured(given, 'rollout')}; "
        f"{length_reason}",
        "experience": experience_reason(given.experience),
        "update": f"{mesh.text} x {_threads(rank_threads)}, microbatches of at most "
        f"{update.max_tokens_per_microbatch} tokens: {_configured(given, 'update')}",
    }
    if given.needs_reference:
        # The frozen model has no optimizer whose state could be moved away.
        stages["reference"] = update.model_copy(
            update={"stage": "reference", "offload_optimizer": False}
        )
        reasons["reference"] = "laid out as the update, which has the same forward pass"
    return DeploymentPlan(
        iteration=given.iteration, stages=stages, reasons=reasons, attempt=given.attempt
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _configured(given: SelectionInput, stage: str) -> str:
    since = given.layout.since(given.iteration, stage)
    text = f"as configured from iteration {since} on" if since else "as configured"
    apart = "" if given.layout.placement == "colocated" else f", {given.layout.placement}"
    return text + apart


def experience_deployment(config: ExperienceConfig) -> StageDeployment:
    """Where rewards and advantages are computed; does not change from iteration to iteration."""
    return StageDeployment(stage="experience", replicas=config.ranks)


def experience_reason(config: ExperienceConfig) -> str:
    """Why `experience_deployment` is what it is, in a sentence."""
    if config.ranks == 1:
        return "1 process: rewards and advantages are a few bytes per episode"
    return f"{config.ranks} processes, each for the groups it holds: as configured"


def model_length(given: SelectionInput, expected: float = 0.0) -> tuple[int, str]:
    """The context that engines are built for, and why. expected: tokens of the longest episode that
    the forecast sees; the longest that was played or that an engine had no room for counts too."""
    seen = max(*given.statistics.context_max, given.context_overflow, 0.0)
    longest = max(seen, expected)
    limit = given.model.max_positions
    asked = min(given.rollout.max_model_len or limit, limit)
    if given.current is not None:
        asked = max(asked, given.current["rollout"].max_model_len or 0)
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
"""What the clause of a reason begins with that says why the engines' context became longer."""

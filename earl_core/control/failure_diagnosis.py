"""Diagnosis of a stage that is infeasible or loses its ranks, and the error that has it repeated.

An infeasible stage is repeated under another choice, one that lost ranks under the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from earl_core.cluster.errors import WorkerCallFailed, WorkerError, WorkerLost
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import STAGES
from earl_core.rollout.errors import ContextOverflow, EngineError, EngineLost
from earl_core.selector.choice.changes import infeasible_text
from earl_core.selector.profile.observations import Kind, Observation
from earl_core.system.errors import EarlError
from earl_core.system.memory import refused


class ReplicasLost(EarlError):
    """No engine is left to play with, or the same episodes have cost too many of them.

    last: what the last engine was lost by.
    """

    def __init__(self, message: str, last: WorkerError) -> None:
        super().__init__(message, last)
        self.last = last

    def __str__(self) -> str:
        return str(self.args[0])


def is_loss(error: WorkerError) -> bool:
    """Tell whether a rank or its engine is gone, so that another may repeat its work.

    An exception of the program is no loss: the program would raise it again.
    """
    if isinstance(error, WorkerCallFailed):
        half_loaded = bool(error.payload.get("engine_lost", False))
        return issubclass(error.kind, EngineLost) or half_loaded
    return isinstance(error, WorkerLost)


def loss_of(error: BaseException) -> WorkerError | None:
    """Return the loss of ranks that the error reports; None where it reports none."""
    if isinstance(error, ReplicasLost):
        return error.last
    return error if isinstance(error, WorkerError) and is_loss(error) else None


class RanksLost(EarlError):
    """A stage lost ranks; it is repeated from its sealed inputs. `__cause__` is how."""


class Infeasible(NamedTuple):
    """The reason why a stage is infeasible. stage: the one that needs another stage deployment,
    empty where the error does not say. tokens: of the context that overflowed."""

    kind: Kind
    stage: str = ""
    tokens: float = 0.0


class StageInfeasible(EarlError):
    """A stage ran out of memory, or its engines out of context; the choice has to be made again.

    `seen`: what was observed, which `select` learns from. `__cause__` is the original error.
    """

    def __init__(self, seen: dict[str, Any], reason: str) -> None:
        super().__init__(seen, reason)
        self.seen = Observation.model_validate(seen)
        self.reason = reason

    def __str__(self) -> str:
        return f"iteration {self.seen.iteration}, {infeasible_text(self.seen)}. {self.reason}"


def diagnose(error: BaseException) -> Infeasible | None:
    """Return the reason why a stage is infeasible if the error says so; None when it is something
    else."""
    if isinstance(error, ReplicasLost):
        return diagnose(error.last)
    if isinstance(error, WorkerLost):
        return Infeasible("out_of_memory") if error.out_of_memory else None
    if isinstance(error, WorkerCallFailed):
        return _raised(error)
    return Infeasible("out_of_memory") if isinstance(error, MemoryError) else None


def _raised(error: WorkerCallFailed) -> Infeasible | None:
    stage = str(error.payload.get("stage", ""))
    if stage in STAGES:
        # Of a step it is the one of its worker group that has to change.
        stage = STAGES[stage].role
    kind, raised = error.kind, error.raised
    if issubclass(kind, ContextOverflow):
        return Infeasible("context_overflow", "rollout", float(error.payload["tokens"]))
    if issubclass(kind, MemoryError) or refused(raised.message):
        return Infeasible("out_of_memory", stage)
    # The kernel's counter may hold kills that are none of ours: it counts where something that
    # could be killed is gone, which shows up as one of these.
    starved = issubclass(kind, EngineError) or kind in (RuntimeError, OSError)
    return Infeasible("out_of_memory", stage) if starved and raised.out_of_memory_kills else None


def require_another(infeasible: StageInfeasible, plan: DeploymentPlan) -> None:
    """Raise the original error when the plan keeps what was infeasible."""
    seen = infeasible.seen
    if plan.stages.get(seen.stage) == seen.deployment:
        cause = infeasible.__cause__
        raise cause if isinstance(cause, WorkerError | ReplicasLost | MemoryError) else infeasible

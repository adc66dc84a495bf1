"""The plan of an iteration: one `StageDeployment` for each stage, with what is expected of it."""

from __future__ import annotations

from pydantic import Field

from earl_core.deployment.placement import Division
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.system.settings import Settings


class Forbidden(Settings):
    """A stage deployment that ran out of memory. beyond_bytes: from what size of the uncalibrated
    memory formula on it is ruled out; 0: under any load."""

    deployment: StageDeployment
    beyond_bytes: float = Field(default=0.0, ge=0)


class Basis(Settings):
    """The load that a plan was chosen for; statistics that stay near it are no cause to move."""

    context: float = Field(ge=0, description="mean tokens of an episode")
    longest: float = Field(ge=0, description="tokens of the longest episode")
    requests: float = Field(ge=0, description="episodes of the iteration")


class StagePrediction(Settings):
    """A plan's expectation of one stage under the load of the next iteration.

    tokens_per_second: of one engine while it decodes, or of a whole training stage. peak_bytes,
    budget_bytes: as the predictor judges them: of one device, on a CPU host of the whole stage.
    """

    seconds: float = Field(ge=0)
    tokens_per_second: float = Field(ge=0)
    peak_bytes: float = Field(ge=0)
    budget_bytes: float
    measured: float = Field(
        default=0.0, ge=0, le=1, description="Measurement behind the seconds: 0 is a guess."
    )


class DeploymentPlan(Settings):
    """One `StageDeployment` per stage, each with its reason in a sentence.

    attempt: how often the iteration's choice was made before this one, because a stage was
    infeasible.
    predictions: by stage; none of one that cannot run so.
    fetch_bandwidth: bytes/s that a host fetches from the others; 0: there are no others, or rows
    are dealt as configured.
    division: of the devices, where the selector chooses it, with a reason of its own under
    `placement`; None: the run file says it. A policy that the run file leaves to `auto` has one
    under `policy`. divided_anew: the attempt at which devices last changed sides within the
    iteration, because a stage did not fit its side; 0: they did not.
    """

    iteration: int = Field(ge=0)
    stages: dict[str, StageDeployment]
    reasons: dict[str, str]
    policy: str = "fixed"
    basis: Basis | None = None
    attempt: int = Field(default=0, ge=0)
    predictions: dict[str, StagePrediction] = Field(default_factory=dict)
    fetch_bandwidth: float = Field(default=0.0, ge=0)
    division: Division | None = None
    divided_anew: int = Field(default=0, ge=0)

    def __getitem__(self, stage: str) -> StageDeployment:
        return self.stages[stage]

    def link_bytes(self, stage: str) -> float:
        """Bytes that a host fetches in the time that the stage is predicted to take; 0: unknown."""
        predicted = self.predictions.get(stage)
        return predicted.seconds * self.fetch_bandwidth if predicted else 0.0

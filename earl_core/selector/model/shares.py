"""The parts that an update's ranks hold of the parameters: of experts that they divide, and of all
else."""

from __future__ import annotations

from typing import NamedTuple

from earl_core.deployment.shapes import ModelShape
from earl_core.deployment.stage_deployment import StageDeployment


class Share(NamedTuple):
    """Parameters that lie on the ranks in the same way.

    numbers: parameters that ranks share, `parts` of them; such a group gathers them. rings: groups
    of other parameters whose ranks stand between those of this one. copies: groups that hold the
    same parameters.
    """

    numbers: float
    parts: int
    rings: int
    copies: int

    @property
    def own(self) -> float:
        """Parameters that lie on one rank."""
        return self.numbers / self.parts

    @property
    def others(self) -> float:
        """Parameters that a rank gets from the others of its group when these gather all."""
        return self.numbers * (self.parts - 1) / self.parts

    @property
    def span(self) -> int:
        """Neighbouring ranks among which the group lies."""
        return self.parts * self.rings


def shares(shape: ModelShape, candidate: StageDeployment) -> list[Share]:
    """Divide the model's parameters over the ranks of an update."""
    return _divided(candidate, float(shape.parameters), float(shape.all_experts))


def trained_shares(shape: ModelShape, candidate: StageDeployment) -> list[Share]:
    """Divide those that are trained; the pairs of an adapter are never of experts."""
    if shape.adapter is None:
        return shares(shape, candidate)
    return _divided(candidate, float(shape.trained_parameters), 0.0)


def _divided(candidate: StageDeployment, parameters: float, experts: float) -> list[Share]:
    tensor = candidate.tensor_parallel
    if candidate.expert_parallel == 1:
        return [Share(parameters / tensor, candidate.parts, tensor, candidate.replicas)]
    copies, shard, context, degree = candidate.expert_axes
    return [
        Share((parameters - experts) / tensor, candidate.parts, tensor, candidate.replicas),
        Share(experts / degree, shard * context, degree, copies),
    ]

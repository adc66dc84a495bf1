"""Memory and time of a stage whose ranks hold another model than the policy, or several."""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.roofline import Roofline


class Scoring:
    """The models that a rank holds, of which the largest decides what work takes.

    shapes: at least one. value: bytes of a number of an engine's. roofline: another one than the
    default, for comparisons.
    """

    def __init__(
        self,
        shapes: Sequence[ModelShape],
        hardware: Hardware,
        value: int,
        roofline: Roofline | None = None,
    ) -> None:
        largest = max(shapes, key=lambda each: each.parameters)
        self._others = 4.0 * (sum(each.parameters for each in shapes) - largest.parameters)
        self.memory = memory_model(largest, hardware)
        self.roofline = roofline or Roofline(largest, device_of(hardware), hardware, value)

    def peak(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> float:
        """Bytes on one device; as `MemoryModel.scoring`, beside the other models' weights."""
        others = self._others / (candidate.tensor_parallel * candidate.parts)
        return self.memory.scoring(candidate, longest, needs).total + others

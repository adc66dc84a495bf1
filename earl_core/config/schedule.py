"""The order of iterations: how far rollouts may run ahead of updates."""

from __future__ import annotations

from pydantic import Field

from earl_core.system.settings import Settings
from earl_core.system.shared_memory import VERSIONS


class ScheduleConfig(Settings):
    """Overlap of iterations, with policy versions that depend on the iteration alone."""

    staleness: int = Field(
        default=0,
        ge=0,
        le=7,
        description="Rollout k is played with policy version max(0, k - staleness), always: with "
        "stages.placement `separate` or `shared` it begins while updates of earlier iterations "
        "still run. 0: each rollout is played with the newest version.",
    )

    @property
    def versions(self) -> int:
        """Sets of published weights that are there at a time, at most: those that rollouts to come
        play, and the one that is being written."""
        return VERSIONS + self.staleness

    def check(self, iterations: int, corrected: bool) -> None:
        """Raise `ValueError` for a staleness that cannot work. corrected: the loss accounts for
        the policy that sampled."""
        if not self.staleness:
            return
        if self.staleness >= iterations:
            raise ValueError(
                f"schedule.staleness ({self.staleness}) must be below iterations ({iterations}): "
                "lower it, or raise iterations"
            )
        if not corrected:
            raise ValueError(
                f"schedule.staleness is {self.staleness}, so that episodes are older than the "
                "policy that trains on them, and nothing corrects for that: set "
                "algorithm.importance_correction (an empty mapping, {}, is its defaults), or "
                "algorithm.policy_loss to `dppo`"
            )

"""The order of iterations: how far rollouts may run ahead of updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from earl_core.system.settings import Settings
from earl_core.system.shared_memory import VERSIONS


class ScheduleConfig(Settings):
    """Overlap of iterations: with policy versions that depend on the iteration alone, or with
    groups that go on under newer ones."""

    staleness: int = Field(
        default=0,
        ge=0,
        le=7,
        description="Rollout k is played with policy version max(0, k - staleness), always: with "
        "stages.placement `separate` or `shared` it begins while updates of earlier iterations "
        "still run. 0: each rollout is played with the newest version.",
    )

    mode: Literal["pinned", "stream"] = Field(
        default="pinned",
        description="pinned: all of a rollout is played with one policy version. stream: groups of "
        "episodes are admitted, and go on under newer weights, while no token that is trained on "
        "is more than staleness versions old; what was not finished goes on after the update.",
    )

    @property
    def streams(self) -> bool:
        """True where groups are sealed one by one, and collected in order."""
        return self.mode == "stream"

    @property
    def pinned(self) -> int:
        """How many versions before the newest one a rollout is played with; engines whose groups go
        on always play the newest."""
        return 0 if self.streams else self.staleness

    @property
    def versions(self) -> int:
        """Sets of published weights that are there at a time, at most: those that rollouts to come
        play, and the one that is being written."""
        return VERSIONS + self.pinned

    def check(self, iterations: int, corrected: bool) -> None:
        """Raise `ValueError` for a staleness that cannot work. corrected: the loss accounts for
        the policy that sampled."""
        if not self.staleness:
            if self.streams:
                raise ValueError(
                    "schedule.mode is `stream` and schedule.staleness 0, so that no group may be "
                    "admitted before the update of the one before it: set staleness to 1 or more"
                )
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

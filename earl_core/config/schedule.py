"""The order of iterations: how far rollouts may run ahead of updates."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from earl_core.system.settings import Settings
from earl_core.system.shared_memory import VERSIONS


class ReplayConfig(Settings):
    """Groups that are trained again in later iterations."""

    share: float = Field(
        description="Part of an iteration's groups that were trained before, at most: besides its "
        "`rollout.prompts_per_iteration` new groups a batch has floor(share / (1 - share) * "
        "prompts_per_iteration) of the newest old ones, no more than max_age * "
        "prompts_per_iteration, or as many as there are. Above 0, below 1."
    )

    max_age: int = Field(
        ge=1,
        description="Most policy versions between a group's oldest token and the update that "
        "trains it again, at least schedule.staleness + 1. Sealed groups stay in shared memory for "
        "so many iterations more.",
    )

    @field_validator("share")
    @classmethod
    def _part_of_a_batch(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError(
                f"{value:g} is no part of a batch that has new groups, too: give a number above 0 "
                "and below 1, such as 0.25, or leave schedule.replay out"
            )
        return value

    def groups(self, prompts: int) -> int:
        """Groups that are trained again beside so many new ones, at most."""
        # What rounding takes from a whole number is no group. Older batches are too old.
        share = math.floor(self.share * prompts / (1 - self.share) + 1e-9)
        return min(share, self.max_age * prompts)

    def check(self, staleness: int, prompts: int) -> None:
        """Raise `ValueError` where no group could be trained again, or none that took long.

        prompts: of an iteration.
        """
        if self.max_age <= staleness:
            raise ValueError(
                f"schedule.replay.max_age is {self.max_age}, but with schedule.staleness "
                f"{staleness} tokens of a group are up to {staleness + 1} versions old in the "
                f"iteration after its own: set max_age to {staleness + 1} or more, or lower "
                "staleness"
            )
        if not self.groups(prompts):
            least = math.ceil(1000 / (prompts + 1)) / 1000
            raise ValueError(
                f"schedule.replay.share is {self.share:g}, which beside {prompts} new groups is "
                f"less than one: set share to {least:g} or more, or raise "
                "rollout.prompts_per_iteration"
            )


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

    replay: ReplayConfig | None = Field(
        default=None,
        description="Groups that were trained before and are trained again, in mode `stream`; "
        "None: each group is trained once.",
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

    @property
    def trained_again(self) -> int:
        """Iterations after a group's own in which it may be trained again."""
        return 0 if self.replay is None else self.replay.max_age

    def check(self, iterations: int, corrected: bool, prompts: int) -> None:
        """Raise `ValueError` for a schedule that cannot work. corrected: the loss accounts for
        the policy that sampled. prompts: of an iteration."""
        if self.replay is not None:
            if not self.streams:
                raise ValueError(
                    "schedule.replay trains groups again that were sealed one by one, and with "
                    f"schedule.mode `{self.mode}` none are: set mode to `stream` and staleness to "
                    "1 or more, or leave replay out"
                )
            self.replay.check(self.staleness, prompts)
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

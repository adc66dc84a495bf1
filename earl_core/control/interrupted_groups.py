"""Groups of a stream that were interrupted: which of them go on, and which are played anew."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from earl_core.run.parked_groups import ParkedGroups, misfit_of

logger = logging.getLogger(__name__)


class InterruptedGroups:
    """What is parked in the run, and what this controller knows to have been interrupted.

    `resumed`: how many have gone on; whoever tells it sets it to 0. Those that are played anew are
    counted with the batches' own. Not for several threads at a time.
    """

    def __init__(self, run: RunDirectory, batches: GroupBatches) -> None:
        self._run, self._batches = run, batches
        self._parked = ParkedGroups(run.path)
        self._lost: set[int] = set()
        self.resumed = 0

    def add(self, groups: Collection[int]) -> None:
        """Groups have lost their engine."""
        self._lost.update(groups)

    def taken(self, groups: Sequence[int], version: int, iteration: int) -> set[int]:
        """Those of the groups that go on from where they are parked; a file that does not fit is
        removed, and said. version: of the engine."""
        going, anew = set(), defaultdict(list)
        for group in groups:
            parked, why = None, "their engine was lost" if group in self._lost else ""
            try:
                parked = self._parked.read(group)
            except ValueError as error:
                logger.warning("%s", error)
                why = "what was parked of them is damaged"
            if parked is not None:
                why = misfit_of(self._run, self._batches, parked, version)
            if why:
                anew[why].append(group)
                self._parked.remove(group)
            elif parked is not None:
                going.add(group)
        self._lost.difference_update(groups)
        for why, each in anew.items():
            self._tell(each, why, iteration)
        return going

    def unlike(self, groups: Sequence[int], iteration: int) -> None:
        """Groups that an engine plays anew, which was to go on with them, or had begun to."""
        if groups:
            why = "what was recorded of them does not hold (the engine's log says why)"
            self._tell(groups, why, iteration)

    def settle(self) -> None:
        """Remove what is parked of groups that are trained for good."""
        size = self._run.config.rollout.prompts_per_iteration
        self._parked.remove_before((self._run.last_stable() + 1) * size)

    def _tell(self, groups: Sequence[int], why: str, iteration: int) -> None:
        text = f"groups {', '.join(map(str, groups))} are played anew: {why}"
        logger.warning("%s", text)
        self._run.note(iteration, "collect", text)
        self._batches.anew += len(groups)

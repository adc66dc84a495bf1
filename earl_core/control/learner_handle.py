"""A trained role of a run: which policy version its live worker group holds, and where its state is
saved."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from earl_core.cluster.group import Group
from earl_core.control.worker_groups import WorkerGroups
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import HANDOFFS, state_path


class LearnerHandle:
    """One for each role that trains a model (`deployment.stages.TRAINED`).

    A version belongs to the group that reported it, so that a group that is lost or rebuilt takes
    it along. parked: the folder of the state that the next group takes over, where the last one
    ended for it.
    """

    def __init__(self, role: str, run: RunDirectory, groups: WorkerGroups) -> None:
        self.role = role
        self._run, self._groups = run, groups
        self._held: tuple[Group | None, int] = None, 0
        self.parked: Path | None = None

    @property
    def version(self) -> int | None:
        """Policy version that the live group holds; None when there is no group."""
        group, version = self._held
        return version if group is not None and group is self._groups.live(self.role) else None

    @version.setter
    def version(self, version: int) -> None:
        self._held = self._groups.live(self.role), version

    def checkpoint(self, iteration: int) -> Path:
        """Return the folder in which the state after the iteration's update is saved."""
        return state_path(self._run.checkpoint_path(iteration).resolve(), self.role)

    @property
    def handoff(self) -> Path:
        """Folder of the state through which the group is rebuilt."""
        return self._run.path.resolve() / HANDOFFS / self.role / "state"

    def drop_handoff(self) -> None:
        """Remove that state, once a newer one was made of it.

        Until then a learner whose update was cut off goes back to it.
        """
        shutil.rmtree(self.handoff.parent, ignore_errors=True)
        with suppress(OSError):
            # Another role's may be there.
            self.handoff.parent.parent.rmdir()

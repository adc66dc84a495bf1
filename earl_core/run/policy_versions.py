"""The policy versions of a run, by its sealed manifests.

The update of an iteration trains one version and makes another; its manifest names both. `assigned`
is the one place that gives a new version its number. Everything else reads: from the manifests of
updates (which iteration made a version) and of published weights (which files carry it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from earl_core.deployment.stages import STAGES, stage_of
from earl_core.dispatch.shards.manifest import Manifest, ManifestError, read_manifest, sealed_path

INITIAL_VERSION = 0
"""The initial model's."""

MADE = "made"
"""Among the outputs of an update's manifest: the policy version that it made."""


class UpdateVersions(NamedTuple):
    """The policy version that an update trains, and the one that it makes."""

    trained: int
    made: int


def assigned(iteration: int) -> UpdateVersions:
    """The versions of an iteration's update when it is started."""
    return UpdateVersions(trained=iteration, made=iteration + 1)


class PolicyVersions:
    """The versions of one run. run: its directory, which is only read. staleness: its
    `schedule.staleness` from which iteration on, ascending; only what is played depends on it.

    An iteration whose update is not sealed has the versions that are assigned to it. Manifests that
    are damaged count as if they were not there.
    """

    def __init__(self, run: Path, staleness: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self._run, self.staleness = run, tuple(staleness)

    def update(self, iteration: int) -> UpdateVersions:
        """The versions of an iteration's update."""
        given = assigned(iteration)
        sealed = self._sealed(iteration, "update")
        if sealed is None:
            return given
        # Updates of older releases name what they trained only.
        return UpdateVersions(sealed.policy_version, int(sealed.outputs.get(MADE, given.made)))

    def before(self, iteration: int) -> int:
        """The version that the iteration's update goes on from: the previous update's result."""
        return self.update(iteration - 1).made if iteration > 0 else INITIAL_VERSION

    def played(self, iteration: int) -> int:
        """The version that the iteration's rollout is played with: the newest one, or the one that
        was so `staleness` iterations ago.

        Where the staleness was raised, none is older than the one that the first rollout after the
        change would have been played with before it: only such are kept.
        """
        version = INITIAL_VERSION
        for (_, staleness), (until, _) in pairwise([*self.staleness, (iteration, 0)]):
            version = max(version, self.before(min(until, iteration) - staleness))
            if until > iteration:
                break
        return version

    def to_play(self, after: int) -> range:
        """The versions up to the one that iteration `after` made that rollouts of later iterations
        are played with, if these are stale; none where each is played with the newest."""
        newest = self.update(after).made
        # Rollouts that run ahead play the newest too, before a learner may hold it after a resume.
        return range(self.played(after + 1), newest + (self._staleness_at(after + 1) > 0))

    def of_stage(self, iteration: int, stage: str) -> int:
        """The version that the stage's manifest names: what it evaluates, trains or publishes, or
        what played its data."""
        name = stage_of(stage)
        makes = STAGES[name].makes if name in STAGES else "state"
        if makes == "state":
            return self.before(iteration)
        return self.update(iteration).made if makes == "weights" else self.played(iteration)

    def maker(self, version: int) -> int | None:
        """The iteration whose update made this version, or is to; None: none of the run does."""
        for iteration in self._iterations():
            made = self.update(iteration).made
            if made <= version:
                return iteration if made == version else None
        return None

    def publication(self, version: int) -> tuple[int, str]:
        """Iteration and stage of the manifest by which this version's weights are published. Raises
        `ManifestError` for a version that no iteration of the run makes."""
        if version == INITIAL_VERSION:
            return 0, "initial"
        maker = self.maker(version)
        if maker is None:
            raise ManifestError(f"no iteration of {self._run} makes policy version {version}")
        return maker, "publish"

    def publications(self) -> Iterator[Manifest]:
        """The sealed manifests of published weights, the newest version first."""
        places = [(iteration, "publish") for iteration in self._iterations()]
        for iteration, stage in (*places, (0, "initial")):
            sealed = self._sealed(iteration, stage)
            if sealed is not None and "weights" in sealed.outputs:
                yield sealed

    def _staleness_at(self, iteration: int) -> int:
        return next(each for since, each in reversed(self.staleness) if since <= iteration)

    def _sealed(self, iteration: int, stage: str) -> Manifest | None:
        with suppress(ManifestError):
            manifest = read_manifest(sealed_path(self._run, iteration, stage))
            if (manifest.iteration, manifest.stage) == (iteration, stage):
                return manifest
        return None

    def _iterations(self) -> list[int]:
        """Iterations that left anything, the newest first."""
        folders = ("iterations", "checkpoints")
        found = {path.name for folder in folders for path in (self._run / folder).glob("[0-9]*")}
        return sorted((int(name) for name in found if name.isdigit()), reverse=True)


def carried(published: Manifest) -> int:
    """The policy version of published weights."""
    return int(published.outputs["weights"]["policy_version"])

"""The sealed groups of a run that are not trained yet, and the batches that they make."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from earl_core.dispatch import Manifest, ManifestError, ShardEntry
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.run.directory import RunDirectory
from earl_core.run.group_journal import GroupJournal, SealedGroup


class GroupBatches:
    """Read from the journal when it is first asked for; a group leaves when a STABLE checkpoint
    covers the iteration that took it. Not for several threads at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._size = run, run.config.rollout.prompts_per_iteration
        self._journal = GroupJournal(run.path)
        self._sealed: dict[int, SealedGroup] | None = None

    def __contains__(self, group: int) -> bool:
        """Tell whether the group is sealed."""
        return group in self._known

    def settle(self, iteration: int) -> None:
        """Forget the groups that are trained for good, before the batch of an iteration."""
        covered = (self._run.last_stable() + 1) * self._size
        first = min(covered, iteration * self._size)
        self._sealed = {g: each for g, each in self._known.items() if g >= first}

    def is_complete(self, iteration: int) -> bool:
        """Tell whether all groups of the iteration's batch are sealed."""
        return all(group in self._known for group in self._batch(iteration))

    def of(self, iteration: int) -> list[SealedGroup]:
        """The sealed groups of the iteration's batch, ascending."""
        return [self._known[each] for each in self._batch(iteration) if each in self._known]

    def entries(self, iteration: int) -> tuple[ShardEntry, ...]:
        """The shards of the batch, which have each row once and the same columns. Raises
        `ManifestError` where they do not."""
        parts = [
            join([self._alone(group, iteration)]) for group in self.of(iteration) if group.shards
        ]
        return Sources.concat(parts).entries

    def seal(self, groups: Sequence[SealedGroup]) -> None:
        """Write groups down, each once."""
        twice = [each.group for each in groups if each.group in self._known]
        if twice:
            raise RuntimeError(f"group {twice[0]} is sealed already")
        self._journal.append(groups)
        self._known.update({each.group: each for each in groups})

    def play_anew(self, groups: Sequence[SealedGroup]) -> None:
        """Forget sealed groups, whose shards are given back, and say so in the journal."""
        self._journal.append([SealedGroup(group=each.group) for each in groups])
        for each in groups:
            self._known.pop(each.group, None)
            for entry in each.shards:
                self._run.stores.release(entry)

    @property
    def _known(self) -> dict[int, SealedGroup]:
        if self._sealed is None:
            first = (self._run.last_stable() + 1) * self._size
            found = [
                each
                for each in self._journal.read().values()
                if each.group >= first and each.tally is not None
            ]
            usable = {each.group: each for each in found if self._is_usable(each)}
            self._sealed = usable
            self.play_anew([each for each in found if each.group not in usable])
        return self._sealed

    def _is_usable(self, group: SealedGroup) -> bool:
        """Tell whether its shards are there, and the run has published the weights that sampled it,
        none of them too old."""
        oldest = group.group // self._size - self._run.config.schedule.staleness
        if min(group.versions, default=oldest) < oldest:
            return False
        with suppress(ManifestError):
            for entry in group.shards:
                self._run.stores.verify(entry, checksum=True)
            return all(digest == self._published(v) for v, digest in group.versions.items())
        return False

    def _published(self, version: int) -> str:
        place = self._run.versions.publication(version)
        return str(self._run.manifest(*place).outputs["digest"])

    def _alone(self, group: SealedGroup, iteration: int) -> Manifest:
        return Manifest(
            run=self._run.uid,
            iteration=iteration,
            stage="group",
            key="",
            policy_version=min(group.versions),
            shards=group.shards,
        )

    def _batch(self, iteration: int) -> range:
        return range(iteration * self._size, (iteration + 1) * self._size)

"""The sealed groups of a run that are to be trained, once or again, and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from earl_core.config.stage_keys import stage_key
from earl_core.dispatch import Manifest, ManifestError, PoolFull, ShardEntry
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.dispatch.spill.storage import SpillError
from earl_core.run.directory import RunDirectory
from earl_core.run.group_journal import SealedGroup
from earl_core.run.record import key_uid
from earl_core.run.replay import age_of, changed_replay, replayed_versions
from earl_core.run.retention import first_kept
from earl_core.trajectory.schema import GROUP_SCHEMA, ROUTING, ROUTING_HASH

_PLAIN = set(GROUP_SCHEMA.names)
_GROUP_COLUMNS = (_PLAIN, {*_PLAIN, ROUTING, ROUTING_HASH})
"""Columns of a group's shards, without and with its routing."""


class GroupBatches:
    """Read from the journal when it is first asked for; a group leaves when a STABLE checkpoint
    covers the last iteration that may train it: the one that took it, or a later one where
    `schedule.replay` trains groups again. `anew`: how many were to be played anew; whoever tells
    it sets it to 0. Not for several threads at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._size = run, run.config.rollout.prompts_per_iteration
        self._journal = run.groups
        self._sealed: dict[int, SealedGroup] | None = None
        self._full = False
        self.anew = 0

    def __contains__(self, group: int) -> bool:
        """Tell whether the group is sealed."""
        return group in self._known

    def settle(self, iteration: int) -> None:
        """Forget the groups that are trained for good, before the batch of an iteration."""
        first = self._first(min(self._run.last_stable() + 1, iteration))
        self._sealed = {g: each for g, each in self._known.items() if g >= first}
        self._journal.since(first)
        self._full = False
        # An update that was done again may have made others of a version, since they were read.
        known: dict[int, str | None] = {}
        own = self.of(iteration)
        self.play_anew([each for each in own if not fits(self._run, each.versions, known)])

    def key(self, iteration: int) -> str:
        """The key of the settings that play the groups of the iteration's batch."""
        config = self._run.config
        branch = self._run.branches.key(iteration, "collect")
        key = stage_key(config, key_uid(self._run.record), iteration, "collect", [], branch)
        # A curriculum draws by returns of an iteration that the staleness chooses.
        return f"{key}-{config.schedule.staleness}" if config.draws_by_returns else key

    def failing(self, iteration: int) -> list[SealedGroup]:
        """The sealed groups of this batch and later ones that have failed episodes."""
        later = (each for g, each in self._known.items() if g >= iteration * self._size)
        return [each for each in later if each.tally and each.tally.get("failed")]

    def is_complete(self, iteration: int) -> bool:
        """Tell whether all groups of the iteration's batch are sealed."""
        return all(group in self._known for group in self._batch(iteration))

    def of(self, iteration: int) -> list[SealedGroup]:
        """The sealed groups of the iteration's batch, ascending."""
        return [self._known[each] for each in self._batch(iteration) if each in self._known]

    def replayed(self, iteration: int) -> list[SealedGroup]:
        """The groups of earlier batches that the iteration trains again, the newest first, beside
        those of its own that have rows. None whose columns are others, as of an older release.

        Their numbers alone say which is newer: a group that took long has older tokens than others
        of its batch, and is not to be left behind for that.
        """
        replay = self._run.config.schedule.replay
        if replay is None:
            return []
        own = [each for each in self.of(iteration) if each.shards]
        alike = {columns for each in own for columns in _columns(each)}
        before = sorted((g for g in self._known if g < iteration * self._size), reverse=True)
        found = (
            each
            for each in map(self._known.__getitem__, before)
            if each.shards
            and age_of(each, iteration) <= replay.max_age
            and _columns(each) <= alike
            and self._is_still_whole(each)
        )
        return list(islice(found, replay.groups(len(own))))

    def entries(self, groups: Sequence[SealedGroup]) -> tuple[ShardEntry, ...]:
        """The shards of the groups, which have each row once and the same columns. Raises
        `ManifestError` where they do not."""
        return Sources.concat([join([self._alone(each)]) for each in groups if each.shards]).entries

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
        self.anew += len(groups)
        for each in groups:
            self._known.pop(each.group, None)
            for entry in each.shards:
                self._run.stores.release(entry)

    @property
    def _known(self) -> dict[int, SealedGroup]:
        if self._sealed is None:
            covered = self._run.last_stable() + 1
            lines = self._journal.since(self._first(covered)).values()
            found = [each for each in lines if each.tally is not None]
            first = covered * self._size
            known: dict[int, str | None] = {}
            usable = {each.group: each for each in found if self._is_usable(each, first, known)}
            self._sealed = usable
            # What is trained for good is not played again, whatever became of it.
            later = [each for each in found if each.group >= first]
            self.play_anew([each for each in later if each.group not in usable])
        return self._sealed

    def _first(self, iteration: int) -> int:
        """The first group that the iteration and later ones may train."""
        return first_kept(iteration, self._run.config.schedule.trained_again) * self._size

    def _is_usable(self, group: SealedGroup, first: int, known: dict[int, str | None]) -> bool:
        """Tell whether it was played by these settings, its shards are there, and the run has
        published the weights that sampled it, none of them too old. first: the first group that is
        not trained for good. known: as of `fits`."""
        batch = group.group // self._size
        if group.key != self.key(batch) or is_old(self._run, batch, group.versions):
            return False
        # One of an older release cannot stand in a batch beside those of this one.
        columns = [set(entry.columns) for entry in group.shards]
        if group.group >= first and any(each not in _GROUP_COLUMNS for each in columns):
            return False
        is_whole = self._is_whole if group.group >= first else self._is_still_whole
        return fits(self._run, group.versions, known) and is_whole(group, checksum=True)

    def _is_whole(self, group: SealedGroup, checksum: bool = False) -> bool:
        with suppress(ManifestError, SpillError):
            for entry in group.shards:
                self._run.check_shard(entry, checksum)
            return True
        return False

    def _is_still_whole(self, group: SealedGroup, checksum: bool = False) -> bool:
        """As `_is_whole`, of a group that was trained and need not come back: not where there is no
        room for it. Nor does another then, before the next batch, because each would wait."""
        if not self._full:
            try:
                return self._is_whole(group, checksum)
            except PoolFull:
                self._full = True
        with suppress(ManifestError):
            for entry in group.shards:
                self._run.stores.verify(entry, checksum=checksum)
            return True
        return False

    def _alone(self, group: SealedGroup) -> Manifest:
        return Manifest(
            run=self._run.uid,
            iteration=group.group // self._size,
            stage="group",
            key="",
            policy_version=min(group.versions),
            shards=group.shards,
        )

    def _batch(self, iteration: int) -> range:
        return range(iteration * self._size, (iteration + 1) * self._size)


def is_old(run: RunDirectory, iteration: int, versions: Iterable[int]) -> bool:
    """Tell whether one of the versions is too old for the iteration to train on its tokens."""
    return min(versions, default=iteration) < iteration - run.config.schedule.staleness


def _columns(group: SealedGroup) -> set[frozenset[tuple[str, str, str | None]]]:
    """Names, types and axes of the columns of each of its shards."""
    return {
        frozenset((name, column.dtype, column.axis) for name, column in entry.columns.items())
        for entry in group.shards
    }


def fits(
    run: RunDirectory, versions: Mapping[int, str], known: dict[int, str | None] | None = None
) -> bool:
    """Tell whether these are the weights that the run has published under these versions. versions:
    their digests. known: the digests that calls for other groups have found, None for a version
    without; it gets those that this one finds."""
    published = {} if known is None else known
    for version in versions.keys() - published.keys():
        published[version] = None
        with suppress(ManifestError):
            found = run.manifest(*run.versions.publication(version))
            published[version] = str(found.outputs["digest"])
    return all(published[version] == digest for version, digest in versions.items())


def misfit(run: RunDirectory, collected: Manifest) -> str:
    """Say why what a batch was collected from is not to be trained on; empty: it is."""
    versions = {int(version): each for version, each in collected.outputs["versions"].items()}
    if is_old(run, collected.iteration, versions):
        return "some of its tokens are older than schedule.staleness allows now"
    if changed_replay(run.config, collected):
        return "schedule.replay has changed"
    sampled = versions | replayed_versions(collected)
    return "" if fits(run, sampled) else "the weights that sampled it are not the run's any more"

"""The sealed groups of a run that are not trained yet, and the batches that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from earl_core.config.stage_keys import stage_key
from earl_core.dispatch import Manifest, ManifestError, ShardEntry
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.run.directory import RunDirectory
from earl_core.run.group_journal import SealedGroup


class GroupBatches:
    """Read from the journal when it is first asked for; a group leaves when a STABLE checkpoint
    covers the iteration that took it. `anew`: how many were to be played anew; whoever tells it
    sets it to 0. Not for several threads at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._size = run, run.config.rollout.prompts_per_iteration
        self._journal = run.groups
        self._sealed: dict[int, SealedGroup] | None = None
        self.anew = 0

    def __contains__(self, group: int) -> bool:
        """Tell whether the group is sealed."""
        return group in self._known

    def settle(self, iteration: int) -> None:
        """Forget the groups that are trained for good, before the batch of an iteration."""
        covered = (self._run.last_stable() + 1) * self._size
        first = min(covered, iteration * self._size)
        self._sealed = {g: each for g, each in self._known.items() if g >= first}
        self._journal.since(first)
        # An update that was done again may have made others of a version, since they were read.
        self.play_anew([each for each in self.of(iteration) if not fits(self._run, each.versions)])

    def key(self, iteration: int) -> str:
        """The key of the settings that play the groups of the iteration's batch."""
        config = self._run.config
        key = stage_key(config, self._run.uid, iteration, "collect", [])
        # A curriculum draws by returns of an iteration that the staleness chooses.
        return key if config.curriculum is None else f"{key}-{config.schedule.staleness}"

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
        self.anew += len(groups)
        for each in groups:
            self._known.pop(each.group, None)
            for entry in each.shards:
                self._run.stores.release(entry)

    @property
    def _known(self) -> dict[int, SealedGroup]:
        if self._sealed is None:
            first = (self._run.last_stable() + 1) * self._size
            lines = self._journal.since(first).values()
            found = [each for each in lines if each.tally is not None]
            usable = {each.group: each for each in found if self._is_usable(each)}
            self._sealed = usable
            self.play_anew([each for each in found if each.group not in usable])
        return self._sealed

    def _is_usable(self, group: SealedGroup) -> bool:
        """Tell whether it was played by these settings, its shards are there, and the run has
        published the weights that sampled it, none of them too old."""
        batch = group.group // self._size
        if group.key != self.key(batch) or is_old(self._run, batch, group.versions):
            return False
        with suppress(ManifestError):
            for entry in group.shards:
                self._run.stores.verify(entry, checksum=True)
            return fits(self._run, group.versions)
        return False

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


def is_old(run: RunDirectory, iteration: int, versions: Iterable[int]) -> bool:
    """Tell whether one of the versions is too old for the iteration to train on its tokens."""
    return min(versions, default=iteration) < iteration - run.config.schedule.staleness


def fits(run: RunDirectory, versions: Mapping[int, str]) -> bool:
    """Tell whether these are the weights that the run has published under these versions. versions:
    their digests."""
    with suppress(ManifestError):
        places = {version: run.versions.publication(version) for version in versions}
        return all(
            run.manifest(*places[version]).outputs["digest"] == digest
            for version, digest in versions.items()
        )
    return False


def misfit(run: RunDirectory, collected: Manifest) -> str:
    """Say why what a batch was collected from is not to be trained on; empty: it is."""
    versions = {int(version): each for version, each in collected.outputs["versions"].items()}
    if is_old(run, collected.iteration, versions):
        return "some of its tokens are older than schedule.staleness allows now"
    return "" if fits(run, versions) else "the weights that sampled it are not the run's any more"

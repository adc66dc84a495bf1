"""The groups of a run that were sealed one by one: `groups.jsonl`, one line for each.

Sealed shards, these lines and the seals of `collect` are all that is known of groups. The last line
of a group counts; one that is to be played anew has no tally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from earl_core.dispatch.shards.manifest import ShardEntry
from earl_core.run.record import Journal

NAME = "groups.jsonl"


class SealedGroup(BaseModel):
    """A group that was played to its end.

    group: its number in the run. key: of the settings that played it, as its batch has it. shards:
    one, or none where all of its episodes have failed. tally: a dumped `RolloutStats`; None: it is
    to be played anew. versions: the digest of the weights of each policy version that has sampled
    tokens of it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: int = Field(ge=0)
    key: str = ""
    shards: tuple[ShardEntry, ...] = ()
    tally: dict[str, Any] | None = None
    versions: dict[int, str] = {}


class GroupJournal:
    """The journal of one run, whose file is read once. Not for several threads at a time."""

    def __init__(self, run: Path) -> None:
        self._journal = Journal(run / NAME)
        self._first = 0
        self._groups: dict[int, SealedGroup] | None = None

    def append(self, groups: Sequence[SealedGroup]) -> None:
        """Write groups down; on disk when this returns."""
        found = self._read()
        if groups:
            self._journal.append_all([each.model_dump(mode="json") for each in groups])
            found.update({each.group: each for each in groups})

    def since(self, first: int) -> Mapping[int, SealedGroup]:
        """The last line of each group from number `first` on, by its number; damaged ones are left
        out. Earlier groups are forgotten, and not found by a later call."""
        found = self._read()
        if first > self._first:
            self._first = first
            self._groups = found = {g: each for g, each in found.items() if g >= first}
        return found

    def files(self, first: int) -> set[str]:
        """The files of the shards of these groups."""
        return {entry.file for group in self.since(first).values() for entry in group.shards}

    def _read(self) -> dict[int, SealedGroup]:
        if self._groups is None:
            self._groups = {}
            for line in self._journal.read():
                with suppress(ValidationError):
                    group = SealedGroup.model_validate(line)
                    self._groups[group.group] = group
        return self._groups

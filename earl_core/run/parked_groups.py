"""Groups that were not finished when their engine ended: `parked/`, one file for each.

A file is written whole or not at all, says a digest of itself, and is used once.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from earl_core.run.directory import RunDirectory
from earl_core.run.group_batches import GroupBatches, fits, is_old
from earl_core.system.files import canonical_json, is_regular, read_file, write_atomic

logger = logging.getLogger(__name__)

FOLDER = "parked"

_NAME = re.compile(r"\.?([0-9]{8,})\.json(\.[0-9]+\.[0-9]+\.tmp)?")


class ParkedGroup(BaseModel):
    """A group that can go on.

    group: its number in the run. key: of the settings that play it, as its batch has it. versions:
    the digest of the weights of each policy version that has sampled tokens of it. episodes: what
    was played, as the rollout worker has dumped it; None: it cannot be played on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: int = Field(ge=0)
    key: str
    versions: dict[int, str]
    episodes: dict[str, Any] | None


class ParkedGroups:
    """The parked groups of a run directory. Any process may write, one at a time a group."""

    def __init__(self, run: Path) -> None:
        self._folder = Path(run) / FOLDER

    def write(self, parked: ParkedGroup) -> None:
        """Write a group, on disk when this returns. Raises `OSError`, and `ValueError` for what
        JSON cannot hold."""
        body = canonical_json(parked.model_dump())
        write_atomic(self._path(parked.group), xxhash.xxh3_128_hexdigest(body).encode() + body)

    def read(self, group: int) -> ParkedGroup | None:
        """The group, if it is parked. Raises `ValueError` for a damaged file, which is removed."""
        try:
            content = read_file(self._path(group))
            told, body = content[:32], content[32:]
            if told != xxhash.xxh3_128_hexdigest(body).encode():
                raise ValueError("its digest is another one")
            parked = ParkedGroup.model_validate_json(body)
            if parked.group != group:
                raise ValueError(f"it is that of group {parked.group}")
            return parked
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.remove(group)
            raise ValueError(f"{self._path(group)} is damaged: {error}") from error

    def take(self, group: int) -> ParkedGroup | None:
        """As `read`, for the one who goes on with it: its file is removed."""
        parked = self.read(group)
        self.remove(group)
        return parked

    def remove(self, group: int) -> None:
        """Remove the group's file, if there is one."""
        _remove(self._path(group))

    def remove_before(self, first: int) -> None:
        """Remove the files of the groups before number `first`, those half written too."""
        for path in self._folder.glob("*"):
            named = _NAME.fullmatch(path.name)
            if named and int(named[1]) < first:
                _remove(path)

    def _path(self, group: int) -> Path:
        return self._folder / f"{group:08d}.json"


def _remove(path: Path) -> None:
    # What is no file of ours is left alone, and ends no run.
    try:
        if is_regular(path):
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not removed: %s", path, error)


def misfit_of(run: RunDirectory, batches: GroupBatches, parked: ParkedGroup, version: int) -> str:
    """Say why a group is not to go on from where it stood; empty: it is. version: of the engine."""
    batch = parked.group // run.config.rollout.prompts_per_iteration
    if parked.episodes is None:
        return "their environment cannot be replayed"
    if parked.key != batches.key(batch):
        return "other settings have played them"
    if is_old(run, batch, parked.versions):
        return "some of their tokens are older than schedule.staleness allows now"
    if max(parked.versions, default=0) > version or not fits(run, parked.versions):
        return "the weights that sampled them are not the run's any more"
    return ""

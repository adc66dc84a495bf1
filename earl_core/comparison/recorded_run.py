"""A run as its records tell it, opened by nobody: sealed stages, who sealed them, rows, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from earl_core.config.redaction import redaction_of
from earl_core.config.stage_keys import stage_key
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import PLAYED, ROWS, STAGES, WEIGHTS, stage_of
from earl_core.dispatch.shards.manifest import Manifest, ManifestError, read_manifest, sealed_path
from earl_core.dispatch.shards.shard import open_batch
from earl_core.guard.caution import caution_in_key
from earl_core.run.branches import Branches
from earl_core.run.checkpoints import stable_checkpoints
from earl_core.run.episodes import NAME, read_samples
from earl_core.run.policy_versions import PolicyVersions
from earl_core.run.record import (
    SOFTWARE,
    RunDamaged,
    key_uid,
    noted_staleness,
    read_lines,
    read_record,
    stored_config,
)
from earl_core.run.run_stores import run_store
from earl_core.system.errors import ConfigError

INITIAL = "initial"
"""The weights that a run begins with, sealed beside the stages of iteration 0."""


class Place(NamedTuple):
    """A sealed stage of an iteration. Sorts as the stages run: waves before what puts them
    together."""

    iteration: int
    wave: float
    order: int
    stage: str

    @classmethod
    def of(cls, iteration: int, stage: str) -> Place:
        """The place of a stage by the name that it is sealed under."""
        name, _, number = stage.partition("_wave")
        wave = float(number) if number.isdigit() else float("inf")
        order = -1 if stage == INITIAL else list(STAGES).index(name)
        return cls(iteration, 0.0 if order <= 0 else wave, order, stage)


class Sealer(NamedTuple):
    """Who has sealed a stage. attempt: None where the ledger does not say. software: versions and
    machine by name; empty where they were not noted."""

    attempt: int | None
    software: Mapping[str, str]


class Rows(NamedTuple):
    """Rows of a stage. source: `shards` or `kept episodes`."""

    table: pa.Table
    source: str


class RecordedRun:
    """A run in a directory. label: what people call it where it stands beside others.

    Raises `ConfigError` where no run lies, or its rules of redaction cannot be had, `RunDamaged`
    where one of another format does, or one without its `run.json`.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.config = stored_config(path)
        self.redaction = redaction_of(self.config)
        try:
            self.record: Mapping[str, Any] = read_record(path)
        except FileNotFoundError:
            raise RunDamaged(f"{path} has no run.json: put it back") from None
        self.versions = PolicyVersions(path, noted_staleness(self.record) or ((0, 0),))
        self.branches = Branches.of(self.record)

    @property
    def uid(self) -> str:
        """The run's own identity; a copy of its directory has the same."""
        return str(self.record["uid"])

    @cached_property
    def ledger(self) -> list[dict[str, Any]]:
        """What each attempt has done, oldest first."""
        return read_lines(self.path / "ledger.jsonl")

    def places(self) -> list[Place]:
        """All sealed stages of iterations, in the order of their work; no evaluations."""
        found = []
        for path in self.path.glob("iterations/[0-9]*/*.json"):
            known = path.stem == INITIAL or stage_of(path.stem) in STAGES
            if known and path.parent.name.isdigit():
                found.append(Place.of(int(path.parent.name), path.stem))
        return sorted(found)

    def manifest(self, place: Place) -> Manifest:
        """A sealed manifest. Raises `ManifestError`."""
        return read_manifest(sealed_path(self.path, place.iteration, place.stage))

    def events(self, place: Place) -> list[dict[str, Any]]:
        """The ledger's lines of a stage."""
        where = place.iteration, place.stage
        return [line for line in self.ledger if (line["iteration"], line["stage"]) == where]

    def sealed_by(self, place: Place) -> Sealer:
        """The attempt that sealed the stage last, and what that was done with."""
        software, found = dict[str, str](), Sealer(None, {})
        for line in self.ledger:
            software = line.get(SOFTWARE, software)
            if (line["iteration"], line["stage"], line["event"]) == (
                place.iteration,
                place.stage,
                "sealed",
            ):
                found = Sealer(int(line["attempt"]), software)
        return found

    def plan(self, iteration: int) -> DeploymentPlan | None:
        """The sealed plan of an iteration; None where there is none to read."""
        with suppress(ManifestError, ValueError, KeyError):
            sealed = self.manifest(Place.of(iteration, "select"))
            return DeploymentPlan.model_validate(sealed.outputs["plan"])
        return None

    def sources(self, place: Place) -> list[Place]:
        """The sealed stages that a stage has read, in the order of its key; published weights by
        the stage that published them. Raises `ManifestError` for weights that nobody made."""
        if place.stage == INITIAL or place.stage not in STAGES:
            return []
        found = []
        imitates = self.config.imitates(place.iteration)
        for name in STAGES[place.stage].sources(self.config, imitates):
            where = place.iteration, name
            if name == WEIGHTS:
                where = self.versions.publication(self.versions.played(place.iteration))
            found.append(Place.of(*where))
        return found

    def keeps_settings(self, place: Place) -> bool | None:
        """Tell whether the settings of now are those that the stage was sealed under, by its key;
        None where the records are not enough to tell."""
        if place.stage not in STAGES or place.stage == "select":
            return None
        try:
            read = [self.manifest(each) for each in self.sources(place)]
            sealed = self.manifest(place)
        except ManifestError:
            return None
        if self.config.rollout.filters_groups and place.stage in (*PLAYED, "reward"):
            return None  # Waves have keys of their own.
        inputs = [*(each.data_digest() for each in read), *caution_in_key(place.stage, read)]
        uid, branch = key_uid(self.record), self.branches.key(place.iteration, place.stage)
        key = stage_key(self.config, uid, place.iteration, place.stage, inputs, branch)
        return key == sealed.key

    def rows(self, sealed: Manifest) -> Rows | None:
        """The rows that a stage has written, from its shards where they are still in the shared
        memory of this host, else from the kept episodes; None where only digests are left. Raises
        `EpisodesDamaged`, `ManifestError` for a shard that cannot be read."""
        with suppress(_Gone):
            return Rows(self._from_shards(sealed), "shards")
        stage = stage_of(sealed.stage)
        if stage not in (*ROWS, "reward") or not sealed.shards:
            return None
        path = sealed_path(self.path, sealed.iteration, sealed.stage).with_name(NAME)
        try:
            table = read_samples(path)
        except FileNotFoundError:
            return None
        written = sealed.column_names()
        own = [name for name in table.column_names if name in written]
        ids = pa.array(sorted(row for entry in sealed.shards for row in entry.row_ids), pa.int64())
        table = table.filter(pa.compute.is_in(table["sample_id"], ids))
        return Rows(table.select(own), "kept episodes")

    def _from_shards(self, sealed: Manifest) -> pa.Table:
        store = run_store(self.path, self.config)
        if not sealed.shards or not all(store.path(each).is_file() for each in sealed.shards):
            raise _Gone
        tables = []
        for entry in sealed.shards:
            memory = pa.BufferReader(pa.py_buffer(store.open(entry).memory))
            batch = open_batch(memory, f"the shard {entry.file}")
            tables.append(pa.Table.from_batches([batch]))
        return pa.concat_tables(tables).sort_by("sample_id")

    def damage(self, sealed: Manifest) -> Iterator[str]:
        """What is wrong with the shards of a stage that are still in shared memory."""
        store = run_store(self.path, self.config)
        for entry in sealed.shards:
            if store.path(entry).is_file():
                try:
                    store.verify(entry, checksum=True)
                except ManifestError as error:
                    yield str(error)

    def checkpoint(self, iteration: int) -> Path | None:
        """The directory of an iteration's whole checkpoint; None where it is gone."""
        there = iteration in stable_checkpoints(self.path)
        return self.path / "checkpoints" / f"{iteration:06d}" if there else None


class _Gone(Exception):
    """Shards that are in shared memory no more."""


def recorded_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs of these directories, under their names, or their paths where names are equal.

    Raises `ConfigError` for the same run twice, and what `RecordedRun` raises.
    """
    for number, path in enumerate(paths):
        if any(path.resolve() == other.resolve() for other in paths[:number]):
            raise ConfigError(f"{path} is given twice: name another run to compare it with")
    names = [path.resolve().name for path in paths]
    return [
        RecordedRun(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]

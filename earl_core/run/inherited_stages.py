"""Sealed stages that are finished although their shards are gone, or although another run did them.

A fork has the later stages of its parent in `inherited/000012/`, under its own uid. Keys of a fork
are made with its parent's uid, and a key covers the data of a stage's inputs and its settings: an
inherited stage with the wanted key is the one that the fork would repeat, to the bit. Rows of
rollouts and rewards are made again of the episodes that were kept, of a run's own stages too, where
shared memory was lost. They count where their checksums are those of the seal: what the redactor
has changed, or what was never kept (a mixture's routing), is done again.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from earl_core.config import RunConfig
from earl_core.config.stage_keys import stage_settings
from earl_core.deployment.stages import WEIGHTS, stage_of, taking_part
from earl_core.dispatch.segments.pool import PoolFull
from earl_core.dispatch.shards.manifest import (
    Manifest,
    ManifestError,
    ShardEntry,
    read_manifest,
    write_manifest,
)
from earl_core.run.branches import Branches
from earl_core.run.directory import RunDirectory
from earl_core.run.episodes import NAME, EpisodesDamaged, read_samples
from earl_core.run.record import INHERITED, read_record
from earl_core.system.files import link_or_copy, make_directory
from earl_core.system.plural import plural
from earl_core.trajectory.samples import Rows
from earl_core.trajectory.schema import GROUP_SCHEMA, REWARD_SCHEMA

logger = logging.getLogger(__name__)

_SCHEMAS = {"rollout": GROUP_SCHEMA, "reward": REWARD_SCHEMA}
"""Stages whose rows are in kept episodes, and the columns that they may have."""

INHERITABLE = ("evaluation", *_SCHEMAS)
"""Stages that a fork takes over: all others are done again, from these, and as fast."""


def inherit(parent: Path, fork: Path, uid: str, after: int) -> None:
    """Write what the parent has sealed after an iteration into a fork's directory, and link the
    episodes. uid: the fork's. Damaged manifests are left out."""
    later = [path for name in (INHERITED, "iterations") for path in (parent / name).glob("[0-9]*")]
    for folder in later:
        if not folder.name.isdigit() or int(folder.name) <= after:
            continue
        place = fork / INHERITED / folder.name
        for path in folder.glob("*.json"):
            if stage_of(path.stem) in INHERITABLE:
                copy_seal(path, place / path.name, uid)
        # Rows are of use to the seals that tell of them.
        if (folder / NAME).is_file() and place.is_dir():
            (place / NAME).unlink(missing_ok=True)
            link_or_copy(folder / NAME, place / NAME)


def copy_seal(path: Path, target: Path, uid: str) -> bool:
    """Write a sealed manifest under another run's uid; whether it could be read. What it says of
    data stays the same."""
    try:
        sealed = read_manifest(path)
    except ManifestError:
        return False
    make_directory(target.parent)
    write_manifest(target, sealed.model_copy(update={"run": uid}))
    return True


def recovered(run: RunDirectory, iteration: int, stage: str, key: str) -> Manifest | None:
    """Seal a stage of this key again that the run has inherited, or whose shards it has lost, with
    rows from the kept episodes; None where it must be done again."""
    if stage_of(stage) not in INHERITABLE:
        return None
    own = run.stage_path(iteration, stage)
    for path in (own, run.path / INHERITED / own.parent.name / own.name):
        try:
            sealed = read_manifest(path)
        except ManifestError:
            continue
        if (sealed.run, sealed.key) != (run.uid, key):
            continue
        try:
            shards = _rebuilt(run, sealed, path.with_name(NAME))
        except (OSError, EpisodesDamaged, PoolFull, _Differs) as error:
            run.note(iteration, stage, f"is done again: {error}")
            logger.info("%s of iteration %d is done again: %s", stage, iteration, error)
            continue
        run.note(iteration, stage, "rows from the kept episodes" if shards else "inherited")
        return run.seal(sealed.model_copy(update={"shards": shards}))
    return None


def foreseen(parent: Path, before: RunConfig, config: RunConfig, after: int) -> list[str]:
    """Sentences about what a fork of these settings takes over of its parent's iterations after
    one, and what it does again. before: the parent's settings."""
    if config.schedule.streams:
        return ["groups of schedule.mode: stream are played anew"]
    iteration = after + 1
    stages = taking_part(config, config.imitates(iteration))
    holds: dict[str, bool] = {WEIGHTS: True}
    for stage in stages:
        same = stage_settings(config, stage.name) == stage_settings(before, stage.name)
        holds[stage.name] = same and all(holds.get(each, True) for each in stage.reads)
    others = [stage.name for stage in stages if not holds[stage.name]]
    there = [each for each in map(int, _numbers(parent)) if each > after]
    returns = Branches.of(read_record(parent)).opened
    if any(each.pending and each.after == after for each in returns):
        there = []  # What is about to be set aside is of another branch than the fork.
    kept = [each for each in there if _on_one_host(config) and _rows_kept(parent, each)]
    told = [stage.name for stage in stages if holds[stage.name] and stage.name in _SCHEMAS]
    if iteration not in there:
        return [f"{parent.name} has done nothing after it: all is done anew"]
    lines = []
    if told and iteration in kept:
        lines.append(f"iteration {iteration}: {' and '.join(told)} taken over, the rest done again")
    else:
        lacking = "its rows were not kept" if _on_one_host(config) else "on several hosts"
        why = lacking if told else "settings"
        lines.append(f"iteration {iteration} is played anew ({why})")
    later = [each for each in kept if each > iteration]
    if others and len(there) > 1:
        lines.append(f"later iterations are played anew: {', '.join(others)} will differ")
    elif later:
        lines.append(
            f"{plural(len(later), 'later rollout')} taken over wherever the weights before it come "
            "out the same, bit for bit"
        )
    return lines


def _numbers(parent: Path) -> set[str]:
    """Iterations of which the parent has sealed rows, or has inherited them."""
    folders = ("iterations", INHERITED)
    found = (path for name in folders for path in (parent / name).glob("[0-9]*/rollout.json"))
    return {path.parent.name for path in found}


def _rows_kept(parent: Path, iteration: int) -> bool:
    for name in ("iterations", INHERITED):
        folder = parent / name / f"{iteration:06d}"
        with suppress(ManifestError):
            columns = read_manifest(folder / "rollout.json").column_names()
            return (folder / NAME).is_file() and columns <= set(GROUP_SCHEMA.names)
    return False


class _Differs(Exception):
    """The kept episodes are not the rows that were sealed."""


def _rebuilt(run: RunDirectory, sealed: Manifest, episodes: Path) -> tuple[ShardEntry, ...]:
    """New shards with the rows of a manifest's. Raises `_Differs`, and what reading and writing
    raise, and leaves no shard then."""
    if sealed.shards and not _on_one_host(run.config):
        raise _Differs("rows are made again in runs of one host alone")
    made: list[ShardEntry] = []
    try:
        for entry in sealed.shards:
            schema = _schema_of(sealed, entry)
            rows = _as_rows(_rows_of(episodes, entry, schema), schema)
            # The layout is covered by the checksum, and the words of a shard's head by the layout.
            _, stage, rank, _ = entry.file.split("-")
            iteration = sealed.iteration
            made.append(
                run.store.publish(
                    stage=stage, iteration=iteration, rank=int(rank), schema=schema, rows=rows
                )
            )
            if made[-1].checksum != entry.checksum:
                raise _Differs(f"{episodes} is not bit for bit what was sealed")
    except BaseException:
        for entry in made:
            run.store.release(entry)
        raise
    return tuple(made)


def _on_one_host(config: RunConfig) -> bool:
    """Where there are several, ranks read from hosts that serve, and the controller's may be none
    of them."""
    return config.cluster.backend == "local" and config.cluster.most == 1


def _schema_of(sealed: Manifest, entry: ShardEntry) -> pa.Schema:
    known = _SCHEMAS.get(stage_of(sealed.stage), pa.schema([]))
    if missing := sorted(entry.columns.keys() - set(known.names)):
        raise _Differs(f"kept episodes have no {', '.join(missing)}")
    return pa.schema([field for field in known if field.name in entry.columns])


def _rows_of(episodes: Path, entry: ShardEntry, schema: pa.Schema) -> pa.Table:
    try:
        table = read_samples(episodes, columns=schema.names)
    except FileNotFoundError:
        raise _Differs("its episodes were not kept") from None
    if missing := sorted(set(schema.names) - set(table.column_names)):
        raise _Differs(f"kept episodes have no {', '.join(missing)}")
    table = table.filter(pc.is_in(table["sample_id"], pa.array(entry.row_ids, pa.int64())))
    if table.num_rows != entry.rows:
        raise _Differs(f"{table.num_rows} of its {entry.rows} samples were kept")
    return table.combine_chunks()


def _as_rows(table: pa.Table, schema: pa.Schema) -> Rows:
    numbers: dict[str, Any] = {}
    lengths: dict[str, np.ndarray] = {}
    strings: dict[str, list[str]] = {}
    for field in schema:
        column = table[field.name].combine_chunks()
        if field.name == "texts":
            strings[field.name] = [json.dumps(texts) for texts in column.to_pylist()]
        elif pa.types.is_large_string(field.type):
            strings[field.name] = column.to_pylist()
        elif pa.types.is_large_list(field.type):
            lengths[field.name] = pc.list_value_length(column).to_numpy().astype(np.int64)
            stops = np.cumsum(lengths[field.name])
            numbers[field.name] = np.split(
                column.flatten().to_numpy(zero_copy_only=False), stops[:-1]
            )
        else:
            numbers[field.name] = column.to_numpy(zero_copy_only=False)
    return Rows(numbers, lengths, strings)

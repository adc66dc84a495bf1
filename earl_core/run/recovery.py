"""Going back to an earlier checkpoint of a run: because a later one is damaged, or by choice.

Everything after it is set aside, never removed: `set_aside/<number>/` in the run directory then
holds the later checkpoints, the later iterations' sealed stages, and `metrics.jsonl` as it was.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from pathlib import Path

from earl_core.run.checkpoints import stable_checkpoints, verify_checkpoint
from earl_core.run.lock import RunLock
from earl_core.run.record import Journal
from earl_core.system.files import make_directory, sync, write_atomic
from earl_core.tensors.errors import CheckpointError

INITIAL = -1
"""Number in place of an iteration's: before the first one."""

logger = logging.getLogger(__name__)


def take_newest_whole(run: Path) -> None:
    """Have the run's last checkpoint be a whole one: damaged ones after it are set aside, and that
    is said in the log and in the ledger.

    Raises `CheckpointError` when none of them is whole, `InUse` for a run that goes on.
    """
    stable = stable_checkpoints(run)
    if not stable:
        return
    with RunLock(run):
        whole, damage = newest_whole(run, stable)
        if damage:
            _set_aside(run, whole, " ".join(damage))


def newest_whole(run: Path, stable: list[int]) -> tuple[int, list[str]]:
    """The last of these checkpoints that is whole, and what is wrong with each after it. Raises
    `CheckpointError` when none is."""
    damage: list[str] = []
    for iteration in reversed(stable):
        try:
            verify_checkpoint(run, iteration)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        return iteration, damage
    raise CheckpointError(
        f"None of the checkpoints of {run} is whole (iterations {', '.join(map(str, stable))}): "
        f"{damage[0]} To begin again with the initial model, `earl resume {shlex.quote(str(run))} "
        "--from initial`, which sets them aside."
    )


def go_back(run: Path, iteration: int) -> None:
    """Have the run go on after this iteration's checkpoint (`INITIAL`: from the initial model).
    Raises `CheckpointError` when that is missing or damaged, before any change, and `InUse`."""
    with RunLock(run):
        stable = stable_checkpoints(run)
        if iteration != INITIAL:
            if iteration not in stable:
                listed = ", ".join(map(str, stable)) or "none"
                raise CheckpointError(
                    f"{run} has no whole checkpoint of iteration {iteration} (it has {listed}): "
                    "name one of them, or `initial`"
                )
            verify_checkpoint(run, iteration)
        _set_aside(run, iteration, "As asked for:")


def _set_aside(run: Path, last: int, reason: str) -> None:
    """Move all that came after iteration `last` out of the run's way; the newest first, so that
    whatever a kill leaves is a run that ended earlier."""
    place = _new_place(run)
    later = sorted(
        (
            path
            for folder in ("checkpoints", "iterations")
            for path in (run / folder).glob("[0-9]*")
            if path.name.isdigit() and int(path.name) > last
        ),
        key=lambda path: int(path.name),
        reverse=True,
    )
    for path in later:
        target = place / path.relative_to(run)
        make_directory(target.parent)
        os.rename(path, target)
        sync(path.parent)
        sync(target.parent)
    _cut_metrics(run, place, last)
    text = f"goes on after iteration {last}" if last >= 0 else "begins again"
    event = f"{reason} The run {text}; what came later was moved to {place}."
    logger.warning("%s", event)
    line = {"time": round(time.time(), 3), "iteration": max(last, 0), "stage": "checkpoint"}
    Journal(run / "ledger.jsonl").append({**line, "event": event})


def _new_place(run: Path) -> Path:
    used = [int(path.name) for path in (run / "set_aside").glob("*") if path.name.isdigit()]
    place = run / "set_aside" / str(max(used, default=0) + 1)
    make_directory(place)
    return place


def _cut_metrics(run: Path, place: Path, last: int) -> None:
    """Take the later iterations' lines out: they are of another past."""
    path = run / "metrics.jsonl"
    if path.is_file():
        shutil.copyfile(path, place / path.name)
        write_atomic(path, lines_through(path, last))


def lines_through(path: Path, last: int) -> bytes:
    """The lines of a journal but those of iterations after `last`; damaged ones stay, to be named
    by whoever reads it. Empty where there is none."""
    if not path.is_file():
        return b""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not _is_later(line, last))


def _is_later(line: bytes, last: int) -> bool:
    try:
        return int(json.loads(line)["iteration"]) > last
    except (ValueError, KeyError, TypeError):
        return False

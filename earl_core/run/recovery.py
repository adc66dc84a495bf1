"""Going back to an earlier checkpoint of a run: a later one is damaged, somebody asks for it, or
the guard has found that the run collapses.

Everything after it is set aside, never removed: `set_aside/<number>/` in the run directory then
holds the later checkpoints, the later iterations' sealed stages, and `metrics.jsonl` as it was; of
a return of the guard also `groups.jsonl`, and what was parked. Such a return is a branch in
`run.json` before anything is moved, and pending until all is: whoever opens the run completes it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from pathlib import Path

from earl_core.run.branches import BRANCHES, Branches
from earl_core.run.checkpoints import stable_checkpoints, verify_checkpoint
from earl_core.run.group_journal import NAME as GROUPS
from earl_core.run.lock import RunLock
from earl_core.run.parked_groups import FOLDER as PARKED
from earl_core.run.record import Journal, read_record, write_record
from earl_core.system import fault_points
from earl_core.system.files import make_directory, sync, write_atomic
from earl_core.tensors.errors import CheckpointError

ASIDE = "set_aside"
"""In the run directory: the folder of what was set aside, by number."""

METRICS = "metrics.jsonl"

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
    Branches that began later are no longer of its past. Raises `CheckpointError` when that is
    missing or damaged, before any change, and `InUse`."""
    with RunLock(run):
        _complete_return(run)
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
        # A kill before this leaves branches that begin where they began.
        branches = _branches(run)
        if branches.through(iteration) != branches:
            _write_branches(run, branches.through(iteration))


def complete_return(run: Path) -> None:
    """Complete the return that the run's record says is pending, if any is. Raises `InUse`."""
    if any(each.pending for each in _branches(run).opened):
        with RunLock(run):
            _complete_return(run)


def _complete_return(run: Path) -> None:
    branches = _branches(run)
    for place, branch in enumerate(branches.opened):
        if not branch.pending:
            continue
        fault_points.point("return.begun", branch.from_iteration)
        aside = run / branch.set_aside
        make_directory(aside)
        _set_played_aside(run, aside)
        _set_aside(run, branch.after, f"Branch {branch.number}: {branch.text}", aside)
        fault_points.point("return.moved", branch.from_iteration)
        done = branch.model_copy(update={"pending": False})
        _write_branches(run, Branches((*branches.opened[:place], done)))
        fault_points.point("return.done", branch.from_iteration)


def _branches(run: Path) -> Branches:
    try:
        return Branches.of(read_record(run))
    except FileNotFoundError:
        return Branches()


def _write_branches(run: Path, branches: Branches) -> None:
    write_record(run, {**read_record(run), BRANCHES: branches.dump()})


def _set_played_aside(run: Path, place: Path) -> None:
    """Groups of a stream: the journal as it was; its later ones have other keys than those of the
    branch. What was parked is of no use to it."""
    _copy_once(run / GROUPS, place / GROUPS)
    if (run / PARKED).is_dir() and not (place / PARKED).exists():
        os.rename(run / PARKED, place / PARKED)
        sync(run)
        sync(place)


def _copy_once(source: Path, target: Path) -> None:
    """Copy a file as it was when this began, however often it begins again."""
    if source.is_file() and not target.exists():
        write_atomic(target, source.read_bytes())


def _set_aside(run: Path, last: int, reason: str, place: Path | None = None) -> None:
    """Move all that came after iteration `last` out of the run's way; the newest first, so that
    whatever a kill leaves is a run that ended earlier. place: where a return that was cut off has
    begun to move it; None: a new one."""
    place = place or _new_place(run)
    # Before anything is cut, and once, however often a return begins again.
    _copy_once(run / METRICS, place / METRICS)
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
        fault_points.point(f"aside.{path.parent.name}", int(path.name))
        os.rename(path, target)
        sync(path.parent)
        sync(target.parent)
    _cut_metrics(run, last)
    text = f"goes on after iteration {last}" if last >= 0 else "begins again"
    event = f"{reason.rstrip('.')}. The run {text}; what came later was moved to {place}."
    logger.warning("%s", event)
    line = {"time": round(time.time(), 3), "iteration": max(last, 0), "stage": "checkpoint"}
    Journal(run / "ledger.jsonl").append({**line, "event": event})


def next_place(run: Path) -> str:
    """Where in the run directory the next thing that is set aside will lie."""
    used = [int(path.name) for path in (run / ASIDE).glob("*") if path.name.isdigit()]
    return f"{ASIDE}/{max(used, default=0) + 1}"


def _new_place(run: Path) -> Path:
    place = run / next_place(run)
    make_directory(place)
    return place


def _cut_metrics(run: Path, last: int) -> None:
    """Take the later iterations' lines out: they are of another past."""
    path = run / METRICS
    if path.is_file():
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

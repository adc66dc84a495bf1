"""The checkpoints of a run as files: their markers, holding one, removing one, what a kill left."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from earl_core.config import ConfigError
from earl_core.system.files import is_regular, sync

MARKER = "STABLE"

_UNFINISHED = re.compile(r"\.[0-9]+\.(building|retired|removed)")
_ASIDE = re.compile(r"\..+\.[0-9]+\.[0-9]+\.tmp")


def stable_checkpoints(run_directory: Path) -> list[int]:
    """Iterations whose checkpoint is whole, ascending. A marker is a file, nothing else."""
    found = (run_directory / "checkpoints").glob(f"*/{MARKER}")
    return sorted(
        int(path.parent.name)
        for path in found
        if re.fullmatch("[0-9]+", path.parent.name) and is_regular(path)
    )


@contextmanager
def holding_checkpoint(marker: Path) -> Iterator[None]:
    """Keep a checkpoint from being pruned, by any process, while it is read.

    marker: its STABLE file. Raises `ConfigError` when it is gone already.
    """
    gone = ConfigError(
        f"the checkpoint {marker.parent} was removed just now, for the run goes on: name a later "
        "one, or keep more of them with checkpoint.keep_last"
    )
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise gone from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            there = os.path.samestat(os.stat(marker), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):
            there = False
        if not there:
            # Removed since it was opened.
            raise gone
        yield
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint unless somebody holds it.

    It is renamed first, so that a kill in the middle leaves what `remove_leftovers` knows.
    """
    descriptor = os.open(path / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = path.with_name(f".{path.name}.removed")
        os.rename(path, aside)
        sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def remove_leftovers(run_directory: Path) -> None:
    """Remove what killed processes left in a run directory: checkpoints half written or half
    removed, and files not yet renamed into place. Only by whoever holds the run's lock."""
    for path in (run_directory / "checkpoints").glob(".*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    for folder in (".", "iterations/*", "checkpoints/*"):
        for path in run_directory.glob(f"{folder}/.*.tmp"):
            if _ASIDE.fullmatch(path.name) and is_regular(path):
                path.unlink(missing_ok=True)

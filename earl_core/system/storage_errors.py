"""Errors of a system that refuses to write, as a sentence with the file and the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from earl_core.system.errors import EarlError

_REMEDIES = {
    errno.ENOSPC: "free space on its file system, or choose another directory",
    errno.EDQUOT: "the quota is used up: remove files of yours there, or have it raised",
    errno.EROFS: "its file system can only be read: mount it for writing, or choose another "
    "directory",
    errno.EMFILE: "this process has too many files open: raise the limit (`ulimit -n`)",
    errno.ENFILE: "the machine has too many files open: end what opens them, or raise fs.file-max",
    errno.EIO: "its disk reports an error: look at `dmesg`, and choose another directory",
    errno.EFBIG: "its file system, or `ulimit -f`, allows no file of this size",
    errno.EACCES: "let this user write there, or choose another directory",
    errno.EPERM: "let this user write there, or choose another directory",
}

_NOTHING_LEFT = 1 << 20
"""Bytes below which a disk counts as full for those who cannot say so themselves."""


class NotWritten(EarlError, OSError):
    """A file of ours could not be written."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Enclose work that writes a file: raises `NotWritten`, which is an `OSError` of the same
    number, with its name and the remedy, where the system has refused it for its own reasons."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if isinstance(error, EarlError) or number is None or number not in _REMEDIES:
            raise
        reason = os.strerror(number)
        problem = f"{path} cannot be written ({reason})"
        raise NotWritten(number, problem, remedy=_REMEDIES[number]) from error


def remedy_of(error: BaseException) -> str:
    """Return the remedy for an error of the system; empty where none is known."""
    return _REMEDIES.get(getattr(error, "errno", None) or 0, "")


def full_disks(places: Iterable[Path]) -> list[str]:
    """The places whose file system has no room; a database there may fail without saying so."""
    found = []
    for place in places:
        there = next((each for each in (place, *place.absolute().parents) if each.exists()), None)
        if there is not None and shutil.disk_usage(there).free < _NOTHING_LEFT:
            found.append(str(place))
    return found

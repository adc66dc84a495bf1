"""Names without spaces for paths that other programs cannot take.

The loader splits LD_PRELOAD at spaces and colons, torch's compiler does not quote the paths of its
libraries and of what it builds, and a UNIX socket's path has at most 107 bytes. A file with another
path is reached through a link of a directory that is this user's alone. It lies in shared memory,
which nobody tidies up while a run goes on; one path has one link, which stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from earl_core.system.errors import NotOurs

LONGEST = 49
"""Bytes of a directory's path below which other programs can still name their sockets: of 107, 36
are a name of vLLM's, 10 a directory of ours, two separators."""

_PLAIN = re.compile(r"[\w./+@,=-]+", re.ASCII)


def is_plain(path: Path) -> bool:
    """Tell whether every program takes the path as it is, however long."""
    return _PLAIN.fullmatch(str(path)) is not None


def is_short(path: Path) -> bool:
    """Tell whether the path of a socket fits into the directory."""
    return len(os.fsencode(path)) <= LONGEST


def links() -> Path:
    """The directory of the links: `/dev/shm/earl-paths-<user id>`."""
    return Path(f"/dev/shm/earl-paths-{os.geteuid()}")


def plain(path: Path, short: bool = False) -> Path:
    """The path, absolute, or a link to it where other programs could not take it. short: sockets
    are to lie in it. Raises `NotOurs` when others could reach into the links."""
    path = path.absolute()
    if is_plain(path) and (is_short(path) or not short):
        return path
    directory = links()
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = os.lstat(directory)
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise NotOurs(
            f"{directory}, through which paths with spaces are reached, is not this user's alone",
            remedy=f"remove it, or use a path without spaces instead of {path}",
        )
    link = directory / hashlib.sha256(os.fsencode(path)).hexdigest()[:10]
    if not link.is_symlink():
        aside = link.with_name(f"{link.name}.{os.getpid()}")
        aside.symlink_to(path)
        aside.replace(link)
    return link

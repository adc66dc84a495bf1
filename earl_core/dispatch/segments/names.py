"""The names that files of a store have. What has another name is not ours and is never removed.

Besides the name a file must be a regular one of this user, lie in a directory that carries our
mark (`earl_core.dispatch.segments.mark`), and not be reached through a link.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path

MARK = ".store.json"
"""What says whose store it is; the first file in it and the last to go."""
LIVE = ".live"
"""Locked by the run that uses the store, for as long as it lives."""
POOL_LOCK = ".pool.lock"
FETCH_LOCK = ".fetch.lock"

_UID = re.compile(r"[0-9a-f]{12}")
_SHARD = r"\d{6,18}-[A-Za-z0-9_-]{1,100}-\d{1,9}-\d{1,20}\.arrow"
_PART = r"fetch-[0-9a-f]{16}-\d{1,9}\.part"
_SEALED = re.compile(rf"{_SHARD}|{_PART}|weights-\d{{8,18}}\.safetensors")
_FREE = re.compile(r"\.free\.\d{1,20}\.\d{1,20}")
_WRITING = re.compile(r"\.writing\.((?:[0-9a-f]{12}|unknown)_\d{1,20}_\d{1,20})\.\d{1,20}")
_DONE = re.compile(r"\.fetch-[0-9a-f]{16}\.\d{1,9}\.done")
_MARK_ASIDE = re.compile(r"\.?\.store\.json\.\d{1,20}\.\d{1,20}\.tmp")
SHARD_PATTERN = rf"^{_SHARD}$"


def new_uid() -> str:
    """The name of a new run among the shards and spills of all runs."""
    return uuid.uuid4().hex[:12]


def is_uid(text: object) -> bool:
    """Whether this can be a run's uid: nothing else may become a part of a path."""
    return isinstance(text, str) and _UID.fullmatch(text) is not None


def is_shard(name: str) -> bool:
    """Whether a shard can have this name."""
    return re.fullmatch(_SHARD, name) is not None


def is_sealed(name: str) -> bool:
    """Whether a published file can have this name: a shard, a received part, weights."""
    return _SEALED.fullmatch(name) is not None


def writer_of(name: str) -> str | None:
    """The process, as text, that the name of a file in state writing says."""
    found = _WRITING.fullmatch(name)
    return found[1] if found else None


def is_unfinished_mark(name: str) -> bool:
    """Whether this is what a process that was killed while it wrote a mark may have left."""
    return _MARK_ASIDE.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether any file of a store can have this name; `MARK` and `LIVE`, which go last, apart."""
    patterns = (_SEALED, _FREE, _WRITING, _DONE, _MARK_ASIDE)
    return name in (POOL_LOCK, FETCH_LOCK) or any(p.fullmatch(name) for p in patterns)


def is_own_file(status: os.stat_result) -> bool:
    """Whether this, by `lstat`, is a regular file of this user, and so no link either."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def own_status(path: Path) -> os.stat_result | None:
    """The status of a regular file of this user; None for anything else, or nothing."""
    with suppress(OSError):
        status = path.lstat()
        return status if is_own_file(status) else None
    return None


def unlink_own(path: Path) -> bool:
    """Remove a regular file of this user; False, and nothing happens, for anything else."""
    with suppress(OSError):
        if is_own_file(path.lstat()):
            path.unlink()
            return True
    return False

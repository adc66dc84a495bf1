"""Marks on weight files that have been hashed on this host, so that none of their readers need to.

Who seals a publication has hashed its bytes. It sets the file's time of change to one that follows
from the digest; whatever is written to the file afterwards sets it to the present, and a file that
was put in its place has another. A write through a mapping does not always set it, but only the
process that wrote a sealed file has a writable mapping of it.
"""

from __future__ import annotations

import os
from pathlib import Path


def mark_hashed(path: Path, digest: str) -> None:
    """Say that the file's tensors have this digest, 32 hex digits; before others can see it."""
    time = _time_of(digest)
    os.utime(path, ns=(time, time), follow_symlinks=False)


def was_hashed(path: Path, digest: str) -> bool:
    """Tell whether somebody has hashed the file, found this digest, and nothing was written
    since."""
    return os.stat(path).st_mtime_ns == _time_of(digest)


def _time_of(digest: str) -> int:
    """Nanoseconds, in the years 1970 to 2003 that every file system knows."""
    seconds, rest = int(digest[:8], 16) % 2**30, int(digest[8:16], 16) % 10**9
    return seconds * 10**9 + rest

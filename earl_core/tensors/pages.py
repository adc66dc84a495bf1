"""Memory of published weights that is used again: a fresh page costs ten times a copy into one.

A file of weights has two names, hard links to the same pages: a hidden one, which stays, and a
visible one that carries the policy version and exists from the moment the file is whole until
anybody removes it. Pages without a visible name and without a reader (readers hold a shared
`flock`) are written again, under the hidden name, for a later version of the same size. A file
that is visible is never written to or truncated, and a crash at any point leaves either the old
or the new visible file, or none, and pages that can be used again.

One process at a time publishes into a directory. Pages are used again and given back only in a
directory that carries the mark of a store, and only regular files of this user under names that
this module gives. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from earl_core.dispatch.segments.mark import make_store, read_mark
from earl_core.dispatch.segments.names import (
    is_linking,
    is_own_file,
    is_pages,
    own_status,
    unlink_own,
)
from earl_core.dispatch.segments.writable_mappings import writable_mappings
from earl_core.system.errors import NotOurs
from earl_core.system.user_directory import make_parent

_HIDDEN = ".weights-pages."
_LINKING = ".weights-linking."
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Pages:
    """A hidden file of allocated pages that this process has for itself until it is closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def seal(self, visible: Path) -> None:
        """Give the file its visible name, in place of an older file of this name."""
        try:
            os.link(self.path, visible)
        except FileExistsError:
            if own_status(visible) is None:
                raise
            aside = visible.with_name(f"{_LINKING}{os.getpid()}")
            unlink_own(aside)
            os.link(self.path, aside)
            os.replace(aside, visible)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links there is one name, and nothing is used again.
            os.replace(self.path, visible)

    def discard(self) -> None:
        """Remove the file and give its memory back, also where this process has it mapped."""
        with contextlib.suppress(OSError, ValueError):
            mapping = writable_mappings.take(self.path, self.path.lstat())
            mapping.discard_pages()
            mapping.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have the pages, once nothing visible names them."""
        os.close(self._descriptor)


def take(directory: Path, size: int) -> Pages:
    """Allocated pages of exactly `size` bytes with any content, used ones where there are.

    Free pages of other sizes are removed. Raises OSError when there is no room.
    """
    make_parent(directory)
    with contextlib.suppress(NotOurs):  # weights may lie beside others' files, but once each
        make_store(directory)
    if read_mark(directory) is not None:
        for stale in directory.glob(f"{_LINKING}*"):
            if is_linking(stale.name):
                unlink_own(stale)  # of a process that was killed while it sealed
    found: Pages | None = None
    for pages in _free(directory):
        if found is None and _allocated(pages.path, size):
            found = pages
            continue
        pages.discard()
        pages.close()
    return found or _allocate(directory, size)


def trim(directory: Path) -> None:
    """Give free pages back to the system: those that no version and no reader holds."""
    for pages in _free(directory):
        pages.discard()
        pages.close()


def open_leased(path: Path) -> int:
    """A descriptor that protects the file from being written again, for a mapping to inherit.

    The lease lasts until the descriptor and every mapping made through it are gone, so also when
    the process is killed. Raises FileNotFoundError when the file was removed meanwhile.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _gone(path) from None
        except OSError:
            # A file system without locks holds models, not recycled pages.
            return descriptor
        # Between opening and locking it may have been removed and used again.
        if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            raise _gone(path)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "the file was removed, its pages are used again", path)


def _free(directory: Path) -> Iterator[Pages]:
    """Locked pages of ours that no one sees or reads. Whoever gets one closes it."""
    if read_mark(directory) is None:
        return
    for path in sorted(directory.glob(f"{_HIDDEN}*")):
        if not is_pages(path.name) or own_status(path) is None:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            free = status.st_nlink == 1 and is_own_file(status)
        except BlockingIOError:
            free = False
        if free:
            yield Pages(path, descriptor)
        else:
            os.close(descriptor)


def _allocated(path: Path, size: int) -> bool:
    """Whether this is a file of the size without holes, as a killed writer may have left."""
    status = os.lstat(path)
    return status.st_size == size and status.st_blocks * 512 >= size


def _allocate(directory: Path, size: int) -> Pages:
    path = directory / f"{_HIDDEN}{os.getpid()}.{time.time_ns()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Pages are claimed before they are touched: writing a sparse mapping on a full tmpfs
        # would end in SIGBUS instead of an error.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"no room for {size:,} bytes of weights in {directory} ({error.strerror}): free space "
            "there or point it at a larger file system",
        ) from error
    return Pages(path, descriptor)

"""Every call of this process that opens, changes or syncs files, told before it is made."""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Hook = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call's name, the real function and the arguments; its result is the call's."""

_OS = (
    "open", "write", "pwrite", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir",
    "ftruncate", "posix_fallocate", "fchmod", "scandir", "listdir", "statvfs",
)  # fmt: skip
_PLACES = [*((os, name) for name in _OS), (fcntl, "flock"), (io, "open"), (mmap, "mmap")]

CHANGES = frozenset(_OS) - {"fsync", "scandir", "listdir", "statvfs"}
"""Calls that may change what a directory holds."""


@contextmanager
def intercepted(hook: Hook) -> Iterator[None]:
    """Have `hook` make the calls. Only in a process of its own: other threads are seen too."""
    real = [(module, name, getattr(module, name)) for module, name in _PLACES]

    def replace(module: Any, name: str, function: Any) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            return hook(name, function, arguments, options)

        setattr(module, name, call)

    try:
        for place in real:
            replace(*place)
        yield
    finally:
        for module, name, function in real:
            setattr(module, name, function)

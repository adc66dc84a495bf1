"""Journals: files of JSON lines that are only appended to, each line with a digest of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from earl_core.system.files import make_directory, read_file, sync, write_all

logger = logging.getLogger(__name__)

_LINE = re.compile(rb'(\{.+), "digest": "([0-9a-f]{16})"\}')


class Journal:
    """One file of lines. Any thread may append; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._named: set[int] = set()

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, which must hold something; on disk when this returns."""
        text = json.dumps(line).encode()
        data = text[:-1] + b', "digest": "' + _digest(text) + b'"}\n'
        make_directory(self.path.parent)
        with self._lock:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                # A crash may have cut the last line off: what follows must not become its end.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                write_all(descriptor, b"\n" + data if torn else data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if size == 0:
                sync(self.path.parent)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first, without their digests; damaged ones are named and left
        out, each once. Raises `OSError` when something else than a file lies there."""
        lines, damaged = _read(self.path)
        for number in sorted(set(damaged) - self._named):
            logger.warning(
                "line %d of %s is damaged and left out: it was edited, or a crash cut it off",
                number,
                self.path,
            )
            self._named.add(number)
        return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; for onlookers, who repair and name nothing."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Whole lines, and the numbers (from 1) of damaged ones.

    What no newline ends may be in the middle of being written: it is neither.
    """
    try:
        *texts, rest = read_file(path).split(b"\n")
    except FileNotFoundError:
        return [], []
    lines, damaged = [], []
    for number, text in enumerate([*texts, rest], start=1):
        found = _LINE.fullmatch(text)
        if found is not None and _digest(found[1] + b"}") == found[2]:
            lines.append(json.loads(found[1] + b"}"))
        elif text and number <= len(texts):
            damaged.append(number)
    return lines, damaged


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()

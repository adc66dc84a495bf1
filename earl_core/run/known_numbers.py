"""Numbers of finished iterations that are asked for in each iteration, read once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from earl_core.run.record import whole_lines
from earl_core.system.files import open_file

Line = dict[str, float]


class KnownNumbers:
    """The lines of a run's metrics.jsonl with those of their numbers that are `wanted` by name, and
    `iteration`. Any thread may read; only what was appended since is read anew."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._path, self._wanted = path, wanted
        self._lock = threading.Lock()
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode, self._read = inode, 0
        self._lines: dict[int, Line] = {}

    def read(self) -> list[Line]:
        """Lines by ascending iteration, of each the latest. Damaged ones are left out."""
        with self._lock:
            try:
                with open_file(self._path) as stream:
                    found = os.fstat(stream.fileno())
                    # Who goes back writes another file.
                    if found.st_ino != self._inode or found.st_size < self._read:
                        self._forget(found.st_ino)
                    stream.seek(self._read)
                    data = stream.read()
            except FileNotFoundError:
                self._forget(0)
                data = b""
            # The last line may be in the middle of being written.
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole_lines(whole.split(b"\n"))[0]:
                kept = {name: value for name, value in line.items() if self._wanted(name)}
                self._lines[int(line["iteration"])] = {"iteration": line["iteration"], **kept}
            return [self._lines[iteration] for iteration in sorted(self._lines)]

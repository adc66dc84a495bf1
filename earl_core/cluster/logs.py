"""Reading the end of a worker's log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from earl_core.secrets import redact

TAIL_LINES = 40
_TAIL_BYTES = 64 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class LogFile:
    """A log that is appended to; `offset` is where the current start's lines begin, in bytes."""

    path: Path
    offset: int = 0

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines written since this start, without colours, progress bars and
        secrets."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                begin = max(self.offset, size - _TAIL_BYTES)
                file.seek(begin)
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        # A progress bar redraws its line after '\r'; only what it showed last matters.
        kept = [line.rstrip().rsplit("\r", 1)[-1] for line in text.split("\n")]
        shown = [_CONTROL.sub("", line) for line in kept if line.strip()]
        return redact("\n".join(shown[-lines:]))

"""The redactor in front of what a process prints and logs."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from earl_core.secrets.redactor import redact


def guard_output() -> None:
    """Hide secrets in everything that Python code of this process prints or logs from now on."""
    if not isinstance(sys.stdout, RedactedStream):
        sys.stdout, sys.stderr = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    guard_logging()


def guard_logging() -> None:
    """Hide secrets in all log records of this process, whoever handles them."""
    factory = logging.getLogRecordFactory()
    if getattr(factory, "redacts", False):
        return

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = factory(*arguments, **named)
        _redact_record(record)
        return record

    make.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


def _redact_record(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
    except Exception:  # a wrong format string; logging itself says so when it is handled
        return
    shown = redact(text)
    if shown != text:
        # Otherwise left alone: some formatters read the arguments.
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))


class RedactedStream:
    """A text stream that redacts what is written to it; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the redacted text; the length that was asked for, as callers expect."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line redacted."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

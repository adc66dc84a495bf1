"""What people see when something goes wrong: one readable block, and a traceback if they ask."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from earl_core.cluster.errors import WorkerCallFailed, WorkerError
from earl_core.system.errors import EarlError

_TAIL_LINES = 12
_LOG_PREFIX = "  | "
_FRAMES = re.compile(
    rf"^({re.escape(_LOG_PREFIX)}|)(.*?)[ ]*Traceback \(most recent call last\):\n"
    r"(?:\1[ \t].*(?:\n|\Z))*",
    re.MULTILINE,
)
_DEBUG_HINT = "Run the command again with --debug for the traceback."


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn an exception into a block on stderr and an exit code: 2 for wrong input, else 1."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # `earl … | head`: the reader has enough. Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except Exception as error:
        # Python 3.11 turns one that falls into the making of a class into a RuntimeError.
        if isinstance(error.__cause__, KeyboardInterrupt):
            print("Stopped.", file=sys.stderr)
            raise typer.Exit(130) from None
        if debug:
            traceback.print_exception(error)
            if isinstance(error, WorkerCallFailed):
                print(f"In the worker:\n{error.raised.traceback}", file=sys.stderr)
        print(describe(error), file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: BaseException) -> int:
    """2 when the input was wrong, 1 otherwise."""
    return error.exit_code if isinstance(error, EarlError) else 1


def describe(error: BaseException) -> str:
    """The block: what happened and what to do, without a traceback. Notes of the error follow."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join([_without_frames("\n".join(_block(error))), *notes])


def _without_frames(text: str) -> str:
    """Cut tracebacks out of a message (those of environments come in one); their errors stay."""
    cut, count = _FRAMES.subn(lambda m: f"{m[1]}{m[2]}\n" if m[2].strip() else "", text)
    return f"{cut.rstrip()}\n{_DEBUG_HINT}" if count and _DEBUG_HINT not in cut else cut


def _block(error: BaseException) -> list[str]:
    if isinstance(error, WorkerCallFailed):
        if error.expected:
            return [f"error: {error.raised.message}"]
        where = error.where
        log = [f"The worker's log is {where.log_path}."] if where.log_path else []
        place = f"It happened in {where.sentence()}."
        return [f"error: {error.reason}", place, *log, _DEBUG_HINT]
    if isinstance(error, WorkerError):
        return [f"error: {_shorten(str(error))}"]
    if isinstance(error, EarlError) and error.expected:
        return [f"error: {error}"]
    if isinstance(error, OSError) and error.filename:
        return [f"error: {error.strerror}: {error.filename}", _DEBUG_HINT]
    # The text of an OSError made of (number, sentence) begins with the number.
    sentence = (isinstance(error, OSError) and error.strerror) or str(error)
    named = ": ".join(part for part in (type(error).__name__, sentence) if part)
    return [f"error: {named}", _DEBUG_HINT]


def _shorten(text: str) -> str:
    lines = text.splitlines()
    head = [line for line in lines if not line.startswith(_LOG_PREFIX)]
    tail = [line for line in lines if line.startswith(_LOG_PREFIX)]
    return "\n".join([*head, *tail[-_TAIL_LINES:]])

"""What people see when something goes wrong: one readable block, and a traceback if they ask."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

WRONG_INPUT = frozenset(
    {"ConfigError", "EnvironmentConfigError", "AlgorithmConfigError", "ModelRefused"}
)
"""Errors in what was asked for; the command exits with 2."""

EXPECTED = WRONG_INPUT | {
    "ChatTemplateError",
    "CheckpointError",
    "EngineUnavailable",
    "ManifestError",
    "MismatchError",
    "ModelBuildError",
    "NonFiniteGradientError",
    "NotOurs",
    "NotPrivate",
    "NothingFits",
    "PoolFull",
    "ProfileError",
    "ReplicasLost",
    "RolloutFailed",
    "RunDamaged",
    "RunInUse",
    "ServerUnavailable",
    "RunUnfinished",
    "RunInterrupted",
    "StateLost",
    "TransportError",
    "UntrustedResult",
    "WeightsError",
}
"""Errors whose message says all that is needed. Named, for most live in modules that import torch
and reach this process by name only."""

WRONG_INPUT_CODE = 2

_TAIL_LINES = 12
_TRACEBACK = "Traceback (most recent call last):"
_LOG_PREFIX = "  | "
_DEBUG_HINT = "Run the command again with --debug for the traceback."


class UsageProblem(ValueError):
    """The arguments of a command cannot be used; the message says what to change."""


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
        print_error(error, debug)
        raise typer.Exit(exit_code(error)) from None


def print_error(error: BaseException, debug: bool) -> None:
    """Write the block to stderr."""
    if debug:
        traceback.print_exception(error)
        remote = getattr(error, "remote_traceback", "")
        if remote:
            print(f"In the worker:\n{remote}", file=sys.stderr)
    print(describe(error), file=sys.stderr)


def exit_code(error: BaseException) -> int:
    """2 when the input was wrong, 1 otherwise."""
    wrong = isinstance(error, UsageProblem) or bool(_names(error) & WRONG_INPUT)
    return WRONG_INPUT_CODE if wrong else 1


def describe(error: BaseException) -> str:
    """The block: what happened and what to do, without a traceback. Notes of the error follow."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join([_without_frames(_block(error)), *notes])


def _without_frames(text: str) -> str:
    """Cut tracebacks out of a message (those of environments come in one); their errors stay."""
    if _TRACEBACK not in text:
        return text
    lines, inside = [], False
    for line in text.splitlines():
        body = line.removeprefix(_LOG_PREFIX)
        if _TRACEBACK in body:
            inside = True
            if before := body.partition(_TRACEBACK)[0].rstrip():
                lines.append(before)
            continue
        inside = inside and body.startswith((" ", "\t"))
        if not inside:
            lines.append(line)
    if _DEBUG_HINT not in lines:
        lines.append(_DEBUG_HINT)
    return "\n".join(lines)


def _block(error: BaseException) -> str:
    names = _names(error)
    if isinstance(error, UsageProblem) or (names & EXPECTED and "WorkerError" not in names):
        return f"error: {_sentence(error)}"
    if "WorkerCallFailed" in names:
        return _worker_call(error)
    if "WorkerError" in names:
        return f"error: {_shorten(str(error))}"
    lines = [f"error: {type(error).__name__}: {_sentence(error)}"]
    if isinstance(error, OSError) and error.filename:
        lines = [f"error: {error.strerror}: {error.filename}"]
    lines.append(_DEBUG_HINT)
    return "\n".join(lines)


def _worker_call(error: BaseException) -> str:
    kind, message = getattr(error, "error_type", ""), getattr(error, "message", "")
    if kind in EXPECTED:
        return f"error: {message}"
    where = getattr(error, "where", None)
    reason = getattr(error, "reason", str(error))
    place = where.sentence() if where is not None else "a worker"
    lines = [f"error: {reason}", f"It happened in {place}."]
    if where is not None and where.log_path:
        lines.append(f"The worker's log is {where.log_path}.")
    lines.append(_DEBUG_HINT)
    return "\n".join(lines)


def _names(error: BaseException) -> set[str]:
    names = {kind.__name__ for kind in type(error).__mro__}
    remote = getattr(error, "error_type", None)
    return names | {remote} if isinstance(remote, str) else names


def _sentence(error: BaseException) -> str:
    # The text of an OSError made of (number, sentence) begins with the number.
    if isinstance(error, OSError) and error.strerror and not error.filename:
        return error.strerror
    return str(error) or type(error).__name__


def _shorten(text: str) -> str:
    lines = text.splitlines()
    head = [line for line in lines if not line.startswith(_LOG_PREFIX)]
    tail = [line for line in lines if line.startswith(_LOG_PREFIX)]
    return "\n".join([*head, *tail[-_TAIL_LINES:]])

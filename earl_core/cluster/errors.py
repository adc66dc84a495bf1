"""Errors of worker groups; each names stage, iteration and rank and ends with the worker's log."""

from __future__ import annotations

import re
import signal as signals
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from earl_core.secrets import redact, shareable
from earl_core.system.errors import EarlError, registered
from earl_core.system.frames import WireError, encode

LossKind = Literal["lost", "stalled", "deadline"]

_TRACEBACK_CHARACTERS = 12_000


@dataclass(frozen=True)
class Where:
    """The work of a worker in which something went wrong, and the last lines of its log."""

    role: str
    rank: int | None
    method: str
    stage: str
    iteration: int | None
    log_path: str = ""
    log_tail: str = ""

    def sentence(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank},"
        iteration = "" if self.iteration is None else f" of iteration {self.iteration}"
        stage = f" in stage '{self.stage}'{iteration}" if self.stage else ""
        doing = f" during '{self.method}'" if self.method else ""
        return f"worker group '{self.role}'{rank}{doing}{stage}"


@dataclass(frozen=True)
class Raised:
    """An exception as it crosses from a rank.

    type, module: of its class; see `kind`. message, traceback: its texts. payload, expected,
    exit_code: as of an `EarlError`; other exceptions are unexpected and may carry a payload too.
    out_of_memory_kills: how many processes the kernel killed for memory while the rank lived (an
    engine's own process, say, whose loss then shows up as this exception).
    """

    type: str
    module: str
    message: str
    traceback: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    expected: bool = False
    exit_code: int = 1
    out_of_memory_kills: int = 0

    @classmethod
    def of(cls, error: BaseException, out_of_memory_kills: int = 0) -> Raised:
        """An exception's description, with secrets hidden and texts cut to a bounded length."""
        text = redact("".join(traceback.format_exception(error)))
        payload = getattr(error, "payload", None)
        return cls(
            type=type(error).__name__,
            module=type(error).__module__,
            message=redact(str(error))[:_TRACEBACK_CHARACTERS],
            traceback=text[-_TRACEBACK_CHARACTERS:],
            payload=_sendable(payload) if isinstance(payload, dict) else {},
            expected=getattr(error, "expected", False),
            exit_code=getattr(error, "exit_code", 1),
            out_of_memory_kills=out_of_memory_kills,
        )

    @property
    def reason(self) -> str:
        """The class, the message, and the kills."""
        plain = self.module in ("", "builtins")
        text = f"{self.type if plain else f'{self.module}.{self.type}'}: {self.message}"
        if self.out_of_memory_kills:
            text += (
                f" (The kernel killed {self.out_of_memory_kills} process(es) for lack of memory "
                "since this rank started.)"
            )
        return text


def _sendable(payload: dict[str, Any]) -> dict[str, Any]:
    try:
        encode(payload)
    except WireError as error:
        return {"error": f"The exception's payload could not be sent: {error}"}
    return payload


class WorkerError(EarlError):
    """Base of all errors of a worker group's start or call. `args` holds plain values only, so that
    an error can be stored with a task's result and rebuilt."""

    expected = False

    def __init__(self, where: Where, reason: str, *details: Any) -> None:
        super().__init__(where, reason, *details)
        self.where = where
        self.reason = reason

    @property
    def rank(self) -> int | None:
        return self.where.rank

    @property
    def log_tail(self) -> str:
        return self.where.log_tail

    @property
    def problem(self) -> str:
        """The message without the worker's log."""
        text = f"{self.where.sentence()}: {self.reason}"
        return text[0].upper() + text[1:]

    def __str__(self) -> str:
        text = self.problem
        if not self.where.log_tail:
            return (
                f"{text}\nIts log {self.where.log_path} is empty." if self.where.log_path else text
            )
        tail = "\n".join(f"  | {line}" for line in self.where.log_tail.splitlines())
        return f"{text}\nLast lines of its log {self.where.log_path}:\n{tail}"


class WorkerLost(WorkerError):
    """A rank, or the group, is gone.

    how: `lost`, or `stalled` (it sent no heartbeat for longer than the group's heartbeat timeout),
        or `deadline` (a call, or a start, took longer than it was given).
    ended: the exit code of the rank's process, negative for a signal; None if it is not known.
    out_of_memory: whether the kernel counted an out-of-memory kill while the rank lived.
    """

    def __init__(
        self,
        where: Where,
        reason: str,
        how: LossKind = "lost",
        ended: int | None = None,
        out_of_memory: bool = False,
    ) -> None:
        super().__init__(where, reason, how, ended, out_of_memory)
        self.how = how
        self.ended = ended
        self.out_of_memory = out_of_memory


class WorkerCallFailed(WorkerError):
    """The target's method, or its constructor, raised. `payload`, `expected` and `exit_code` are
    those of what it raised; the rank logs the traceback too, at the end of the printed log."""

    def __init__(self, where: Where, raised: Raised) -> None:
        super().__init__(where, raised.reason)
        self.args = (where, raised)
        self.raised = raised
        self.payload = raised.payload
        self.expected = raised.expected
        self.exit_code = raised.exit_code

    @property
    def kind(self) -> type[BaseException]:
        """The class of what was raised; `Exception` where this process does not know it."""
        return registered(self.raised.type)


def describe_exit(code: int, out_of_memory: bool) -> str:
    """Say in words how a process ended; `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        name = f" ({signals.Signals(-code).name})"
    except ValueError:
        name = ""
    text = f"its process was killed by signal {-code}{name}"
    if out_of_memory:
        text += (
            ", probably by the kernel's out-of-memory killer; lower the stage's memory "
            "(smaller microbatch, shorter KV cache) or give the machine more"
        )
    return text


TAIL_LINES = 40
_TAIL_BYTES = 64 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


_RAISED = re.compile(
    r"(?:^|[\s\]])((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt): \S.*)$"
)
_COMPLAINT = re.compile(r"(?i)\b(?:fatal|error|cannot|can't|undefined|failed)\b.*\S")
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|EngineDeadError|See stack trace|See root cause"
    r"|ProcessRaisedException|ProcessExitedException"
)
_LINE_CHARACTERS = 400


def last_error(text: str) -> str:
    """The last line of a log that is an error, without what loggers put before it; empty: none.

    An exception goes before what only sounds like one, and what was raised because of another
    process's end says nothing of the cause.
    """
    raised, complaint = "", ""
    for line in text.splitlines():
        if _SECOND_HAND.search(line):
            continue
        if found := _RAISED.search(line.rstrip()):
            raised = found[1]
        elif _COMPLAINT.search(line):
            complaint = line.strip()
    return shareable(_CONTROL.sub("", raised or complaint))[:_LINE_CHARACTERS]


@dataclass(frozen=True)
class LogFile:
    """A log that is appended to; `offset` is where the current start's lines begin, in bytes."""

    path: Path
    offset: int = 0

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines written since this start, without colours, progress bars and secrets."""
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
        return shareable("\n".join(shown[-lines:]))

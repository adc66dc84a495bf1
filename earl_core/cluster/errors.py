"""Errors of worker groups; each names stage, iteration and rank and ends with the worker's log."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Where:
    """What a worker was doing when something went wrong, and the last lines of its log."""

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


class WorkerError(RuntimeError):
    """Base of all errors of a worker group's start or call.

    `args` holds plain values only, so that an error can be stored with a task's result and rebuilt.
    """

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

    def __str__(self) -> str:
        text = f"{self.where.sentence()}: {self.reason}"
        text = text[0].upper() + text[1:]
        if not self.where.log_tail:
            return (
                f"{text}\nIts log {self.where.log_path} is empty." if self.where.log_path else text
            )
        tail = "\n".join(f"  | {line}" for line in self.where.log_tail.splitlines())
        return f"{text}\nLast lines of its log {self.where.log_path}:\n{tail}"


class WorkerLost(WorkerError):
    """A rank, or the group, is gone.

    `exit_code` is the rank's exit status (`None` if a signal ended it or it is not known), `signal`
    the number of the signal that ended it, `out_of_memory` whether the kernel counted an
    out-of-memory kill while the rank lived.
    """

    def __init__(
        self,
        where: Where,
        reason: str,
        exit_code: int | None = None,
        signal: int | None = None,
        out_of_memory: bool = False,
    ) -> None:
        super().__init__(where, reason, exit_code, signal, out_of_memory)
        self.exit_code = exit_code
        self.signal = signal
        self.out_of_memory = out_of_memory


class WorkerStalled(WorkerError):
    """A rank sent no heartbeat for longer than the group's heartbeat timeout."""


class DeadlineExceeded(WorkerError):
    """A call, or a start, took longer than it was given."""


class WorkerCallFailed(WorkerError):
    """The target's method, or its constructor, raised.

    `error_type` and `error_module` name the exception's class, `message` is its text, `payload` the
    JSON it carried in an attribute of that name (for example the bytes that were predicted),
    `out_of_memory_kills` how many processes the kernel killed for memory while the rank lived (an
    engine's own process, say, whose loss then shows up as this exception). The traceback stands in
    `remote_traceback` and, as the rank logs it too, at the end of the printed log.
    """

    def __init__(
        self,
        where: Where,
        error_type: str,
        error_module: str,
        message: str,
        remote_traceback: str = "",
        payload: dict[str, Any] | None = None,
        out_of_memory_kills: int = 0,
    ) -> None:
        name = error_type if error_module in ("", "builtins") else f"{error_module}.{error_type}"
        reason = f"{name}: {message}"
        if out_of_memory_kills:
            reason += (
                f" (The kernel killed {out_of_memory_kills} process(es) for lack of memory since "
                "this rank started.)"
            )
        super().__init__(where, reason)
        self.args = (
            where,
            error_type,
            error_module,
            message,
            remote_traceback,
            payload,
            out_of_memory_kills,
        )
        self.error_type = error_type
        self.error_module = error_module
        self.message = message
        self.remote_traceback = remote_traceback
        self.payload = payload
        self.out_of_memory_kills = out_of_memory_kills


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

"""The base of this project's errors.

A message reads "<thing> <problem>: <what to do>". A class of its own stands for what somebody
catches apart; all else is raised as `EarlError`.
"""

from __future__ import annotations

import builtins
from typing import Any


class EarlError(Exception):
    """An error of ours.

    parts: the problem; of an `OSError` also its number before it, or plain values for a class that
        makes its own sentence of them.
    remedy: the imperative after the colon; empty where the problem holds it, or there is none.
    payload: plain data for whoever handles the error, also in another process.

    exit_code: the status with which a command ends that raises it.
    expected: whether the message says all, so that the command line adds neither class nor hint.
    """

    exit_code: int = 1
    expected: bool = True

    def __init__(
        self, *parts: Any, remedy: str = "", payload: dict[str, Any] | None = None
    ) -> None:
        super().__init__(*parts)
        self.remedy = remedy
        self.payload: dict[str, Any] = payload or {}

    def __init_subclass__(cls) -> None:
        _REGISTERED[cls.__name__] = cls

    @property
    def problem(self) -> str:
        """The message without the remedy."""
        return getattr(self, "strerror", None) or super().__str__()

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}" if self.remedy else self.problem


_REGISTERED: dict[str, type[BaseException]] = {}


def registered(name: str) -> type[BaseException]:
    """The class of a name that came from another process; `Exception` where it is not known here.
    Known are Python's own, and ours as far as their modules are imported."""
    found = _REGISTERED.get(name) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    return Exception


class ConfigError(EarlError, ValueError):
    """A request that cannot work: a setting, an argument, a model, an environment, a secret."""

    exit_code = 2


class Cancelled(EarlError):
    """The work was asked to stop."""


class InUse(EarlError):
    """Another live process has it. holder: which one, as far as it is known."""

    def __init__(self, message: str, holder: str = "unknown") -> None:
        super().__init__(message)
        self.holder = holder


class NotOurs(EarlError, OSError):
    """Something lies in a place of ours that we did not put there, or others can reach into it."""

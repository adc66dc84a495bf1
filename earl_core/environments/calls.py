"""One environment call inside a host: what it runs, and how its outcome is put on the wire."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from numbers import Real
from typing import Any

from earl_core.environments.base import Environment, StepResult
from earl_core.environments.wire import encode
from earl_core.secrets import redact

logger = logging.getLogger(__name__)

LARGEST_NUMBER = 1e30
"""Of a reward or metric: what comes of it, sums and float32 columns, must stay finite too."""

_DETAIL_CHARACTERS = 4000


class InvalidResultError(TypeError):
    """The environment returned what the protocol does not allow."""


class Calls:
    """The environments of one host, by episode.

    create: makes a fresh environment.
    """

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._create = create
        self._environments: dict[int, Environment] = {}

    def run(self, kind: str, call: int, episode: int, arguments: tuple[Any, ...]) -> bytes | None:
        """Runs a call and returns its encoded reply, None for "close".

        What the environment raises, SystemExit included, becomes a "failed" reply.
        """
        try:
            if kind == "close":
                self._close(episode)
                return None
            if kind == "reset":
                environment = self._environments[episode] = self._create()
                messages = environment.reset(*arguments)
                return _encode(["messages", call, _checked_first(messages)])
            result = self._environments[episode].step(*arguments)
            return _encode(["result", call, *_checked_result(result)])
        except InvalidResultError as error:
            self._close(episode)
            return self.failure(call, "invalid_result", str(error))
        except (Exception, SystemExit, KeyboardInterrupt):
            detail = traceback.format_exc()
            self._close(episode)
            return self.failure(call, "exception", detail)

    def drop(self, episode: int) -> None:
        """Forgets an environment that is still busy."""
        self._environments.pop(episode, None)

    def episodes(self) -> list[int]:
        """The episodes that are open."""
        return list(self._environments)

    @staticmethod
    def failure(call: int, reason: str, detail: str) -> bytes:
        """An encoded "failed" reply with the end of `detail`."""
        # Whoever prints it must be able to, also where the environment raised what is no UTF-8.
        printable = redact(detail.encode("utf-8", "backslashreplace").decode())
        return encode(["failed", call, redact(reason), printable[-_DETAIL_CHARACTERS:]])

    def _close(self, episode: int) -> None:
        environment = self._environments.pop(episode, None)
        if environment is not None:
            try:
                environment.close()
            except (Exception, SystemExit, KeyboardInterrupt):
                logger.warning("close() of an environment raised", exc_info=True)


def _encode(reply: list[Any]) -> bytes:
    try:
        return encode(reply)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResultError(
            f"StepResult.info must hold only what JSON can (no NaN, no arrays): {error}."
        ) from error


def _checked_messages(messages: Any) -> Any:
    if not isinstance(messages, (list, tuple)):
        raise InvalidResultError(f"Messages must be a list, not {type(messages).__name__}.")
    for message in messages:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise InvalidResultError(
                f"A message must be a dict with the texts role and content, not {message!r:.200}."
            )
        _check_text("A message's role", message["role"])
        _check_text("A message's content", message["content"])
    return messages


def _checked_first(messages: Any) -> Any:
    if not _checked_messages(messages):
        raise InvalidResultError(
            "reset() must return at least one message, for the agent has nothing to answer yet."
        )
    return messages


def _checked_result(result: Any) -> tuple[Any, float, bool, dict[str, Any]]:
    if not isinstance(result, StepResult):
        raise InvalidResultError(f"step() must return a StepResult, not {type(result).__name__}.")
    reward = _checked_number("The reward", result.reward)
    info = _checked_info(result.info)
    messages = _checked_messages(result.messages)
    if not result.done and not messages:
        raise InvalidResultError("A step that does not end the episode must return a message.")
    return messages, reward, bool(result.done), info


def _checked_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise InvalidResultError(f"info must be a dict, not {type(info).__name__}.")
    if isinstance(info.get("outcome"), str):
        _check_text('info["outcome"]', info["outcome"])
    if "metrics" not in info:
        return info
    metrics = info["metrics"]
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise InvalidResultError(
            f'info["metrics"] must be a dict of numbers by name, not {metrics!r:.200}.'
        )
    for name in metrics:
        _check_text('A name in info["metrics"]', name)
    numbers = {n: _checked_number(f'info["metrics"][{n!r}]', v) for n, v in metrics.items()}
    return {**info, "metrics": numbers}


def _checked_number(what: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    # Not so for NaN either.
    if not abs(number) <= LARGEST_NUMBER:
        raise InvalidResultError(
            f"{what} must be a finite number between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}, "
            f"not {_shown(value)}: scale it, or leave it out."
        )
    return number


def _shown(value: Any) -> str:
    # Text of a very long integer is refused by the interpreter.
    large = isinstance(value, int) and abs(value) > LARGEST_NUMBER
    return "a larger integer" if large else f"{value!r:.200}"


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidResultError(
            f"{what} cannot be encoded as UTF-8 ({error.reason} at character {error.start}): read "
            'its source as UTF-8, or pass it through text.encode("utf-8", "replace").decode().'
        ) from None

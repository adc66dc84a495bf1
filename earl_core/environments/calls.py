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

logger = logging.getLogger(__name__)

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
                return _encode(["messages", call, _checked_messages(messages)])
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
        return encode(["failed", call, reason, detail[-_DETAIL_CHARACTERS:]])

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
    return messages


def _checked_result(result: Any) -> tuple[Any, float, bool, dict[str, Any]]:
    if not isinstance(result, StepResult):
        raise InvalidResultError(f"step() must return a StepResult, not {type(result).__name__}.")
    if not isinstance(result.reward, Real) or not math.isfinite(result.reward):
        raise InvalidResultError(f"The reward must be a finite number, not {result.reward!r}.")
    if not isinstance(result.info, dict):
        raise InvalidResultError(f"info must be a dict, not {type(result.info).__name__}.")
    messages = _checked_messages(result.messages)
    if not result.done and not messages:
        raise InvalidResultError("A step that does not end the episode must return a message.")
    return messages, float(result.reward), bool(result.done), result.info

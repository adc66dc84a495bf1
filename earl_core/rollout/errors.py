"""Errors of the rollout."""

from __future__ import annotations

from typing import Any


class ChatTemplateError(ValueError):
    """A chat template or tokenizer that multi-turn play cannot use; says what to change."""


class RolloutCancelled(RuntimeError):
    """The caller gave the rollout up; nothing was written."""


class RolloutFailed(RuntimeError):
    """Too many episodes failed. `payload` counts the failures by reason and names the first."""

    def __init__(self, message: str, payload: dict[str, Any]) -> None:
        super().__init__(message)
        self.payload = payload

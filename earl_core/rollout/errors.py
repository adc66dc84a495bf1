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


class ContextOutgrown(RuntimeError):
    """An episode reached the end of the engine's context where the model has more positions.

    Nothing is cut there: whoever planned the engine builds it anew for longer sequences and plays
    the stage again. `payload` holds tokens, the least that the episode needs, and max_model_len,
    what the engine was built for.
    """

    def __init__(self, tokens: int, max_model_len: int, positions: int) -> None:
        super().__init__(
            f"an episode needs at least {tokens:,} tokens, but the engine was built for "
            f"{max_model_len:,} and the model has {positions:,} positions: build the engine for "
            "more (rollout.max_model_len is where it begins), for EARL cuts no episode"
        )
        self.payload: dict[str, Any] = {"tokens": tokens, "max_model_len": max_model_len}

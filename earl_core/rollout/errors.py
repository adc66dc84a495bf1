"""Errors of a rollout as a whole, and of its engine. One episode that fails is no error."""

from __future__ import annotations

from earl_core.system.errors import EarlError


class RolloutFailed(EarlError):
    """Too many episodes failed. `payload` counts the failures by reason and names the first."""

    @classmethod
    def too_many(
        cls, failed: int, episodes: int, share: float, reasons: dict[str, int], examples: str
    ) -> RolloutFailed:
        """Make the error of more failed episodes than `share` allows; examples: text that names
        some."""
        return cls(
            f"{failed} of {episodes} episodes failed, more than the share of {share:g} that "
            "rollout.max_failed_share allows: repair the environment, or raise that share."
            f"{examples}",
            payload={"failed": failed, "episodes": episodes, "reasons": reasons},
        )


class ContextOverflow(EarlError):
    """An episode reached the end of the engine's context where the model has more positions.

    Nothing is cut there: whoever planned the engine builds it anew for longer sequences and plays
    the stage again. `payload` holds tokens, the least that the episode needs, and max_model_len,
    what the engine was built for.
    """

    expected = False

    def __init__(self, tokens: int, max_model_len: int, positions: int) -> None:
        super().__init__(
            f"context overflow: an episode needs at least {tokens:,} tokens, but the engine was "
            f"built for {max_model_len:,} and the model has {positions:,} positions",
            remedy="build the engine for more (rollout.max_model_len is where it begins), because "
            "EARL cuts no episode",
            payload={"tokens": tokens, "max_model_len": max_model_len},
        )


class EngineError(EarlError):
    """Anything an engine cannot do."""

    expected = False


class EngineLost(EngineError):
    """The engine died, or an update failed half-way: stop it and start a fresh one."""


class WeightSyncError(EngineError):
    """Weights did not arrive as their manifest describes them.

    The engine still runs with its former weights when `engine_lost` is false; otherwise its
    weights are undefined and every later call raises `EngineLost`. `payload` says it to those who
    see this error from another process.
    """

    def __init__(self, message: str, *, engine_lost: bool = False) -> None:
        super().__init__(message, payload={"engine_lost": engine_lost})
        self.engine_lost = engine_lost

"""What the last iterations showed, and what the next ones will bring: `Statistics`, `forecast`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from earl_core.config.settings import Settings


class Statistics(Settings):
    """What the last finished iterations showed; every series has its newest value last.

    Contexts in tokens of an episode, rates in tokens/s, waits and switches in seconds, peaks in
    bytes on one device by stage.
    """

    iterations: tuple[int, ...] = ()
    context_mean: tuple[float, ...] = ()
    context_p95: tuple[float, ...] = ()
    context_max: tuple[float, ...] = ()
    context_by_turn: tuple[float, ...] = Field(
        default=(), description="Mean context after each turn of the newest iteration."
    )
    live_tokens_max: tuple[float, ...] = ()
    running_requests_mean: tuple[float, ...] = ()
    turns_mean: tuple[float, ...] = ()
    generated_share: tuple[float, ...] = Field(
        default=(), description="Part of an episode's tokens that the model wrote."
    )
    tool_wait_seconds: tuple[float, ...] = Field(default=(), description="Mean of one answer's.")
    rollout_tokens_per_second: tuple[float, ...] = ()
    update_tokens_per_second: tuple[float, ...] = ()
    peak_bytes: dict[str, float] = Field(default_factory=dict)
    switch_seconds: dict[str, float] = Field(
        default_factory=dict, description="Last measured rebuild of a stage's worker group."
    )
    relayout_seconds: dict[str, float] = Field(
        default_factory=dict, description="Last measured move of live ranks to another mesh."
    )


WINDOW = 8
"""Iterations that a trend is taken from."""


def forecast(series: Sequence[float], steps: int, noise: float) -> float:
    """The value `steps` iterations after the newest, never below the newest.

    A least-squares line through the last `WINDOW` values; its slope counts only when it explains a
    change over the window larger than any noise of ±noise/2 around a level could (1.5 · noise).
    Growth alone is forecast: a plan that is too large for shrinking contexts still works.
    """
    recent = [float(value) for value in series[-WINDOW:]]
    if not recent:
        return 0.0
    count, newest = len(recent), recent[-1]
    if count < 3:
        return newest
    middle, mean = (count - 1) / 2, sum(recent) / count
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (v - mean) for place, v in enumerate(recent)) / spread
    if slope * (count - 1) <= 1.5 * noise * mean:
        return newest
    return newest + slope * steps

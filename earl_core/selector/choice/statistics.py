"""What the last iterations showed, and what the next ones will bring: `Statistics`, `forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression

from pydantic import Field

from earl_core.config.settings import Settings


class Statistics(Settings):
    """What the last finished iterations showed; every series has its newest value last.

    Contexts in tokens of an episode, waits and switches in seconds.
    """

    context_mean: tuple[float, ...] = ()
    context_max: tuple[float, ...] = ()
    turns_mean: tuple[float, ...] = ()
    generated_share: tuple[float, ...] = Field(
        default=(), description="Part of an episode's tokens that the model wrote."
    )
    tool_wait_seconds: tuple[float, ...] = Field(default=(), description="Mean of one answer's.")
    switch_seconds: dict[str, float] = Field(
        default_factory=dict, description="Last measured rebuild of a stage's worker group."
    )
    reshard_seconds: dict[str, float] = Field(
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
    recent = series[-WINDOW:]
    if len(recent) < 3:
        return float(recent[-1]) if recent else 0.0
    slope = linear_regression(range(len(recent)), recent).slope
    if slope * (len(recent) - 1) <= 1.5 * noise * fmean(recent):
        return float(recent[-1])
    return recent[-1] + slope * steps

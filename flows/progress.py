"""A run's events in words, and the choice of those that deserve a line of a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tasks.reports.lines import signed

Event = Mapping[str, Any]

_PREPARATIONS = {
    "starting": "starting the {} worker",
    "resharding": "resharding the {}",
    "downloading": "downloading the model {} from the model hub",
    "building": "building the model {}",
}
_UNITS = ("episodes", "samples", "steps", "MB")

FIRST_SECONDS = 2.0
"""Seconds from when on work that goes on is told of."""
EVERY_SECONDS = 10.0
"""Most seconds for which a log of work that goes on is silent."""


def preparation(event: Event) -> str:
    """Describe the workers or the model that a stage waits for, by an event; empty: nothing."""
    return next((form.format(event[k]) for k, form in _PREPARATIONS.items() if k in event), "")


def counted(event: Event) -> tuple[float, float, str]:
    """Return how many are done of how many, and of what, such as `episodes` or `MB`; (0, 0, "")
    where an event does not count."""
    for unit in _UNITS:
        if f"{unit}_done" in event:
            return event[f"{unit}_done"], event.get(unit, 0.0), unit
    return 0.0, 0.0, ""


def numbers_text(event: Event) -> str:
    """The numbers of an event, such as `12/64 episodes, 840 tokens/s, return +0.30`."""
    done, total, unit = counted(event)
    parts = [f"{done:.0f}/{total:.0f} {unit}"] if total else []
    if event.get("tokens_per_second"):
        parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if "return" in event and done:
        parts.append(f"return {signed(event['return'], 2)}")
    return ", ".join(parts)


def work_text(stage: str, iteration: int) -> str:
    """Work that goes on: `iteration 3: update`, `evaluation after 3 iterations`."""
    if stage == "evaluation":
        return f"evaluation of policy version {iteration}"
    alone = {"model": "the model:", "profile": "the profile:"}
    return alone.get(stage) or f"iteration {iteration}: {stage}"


class Pace:
    """The lines that a log gets of events that come several times a second: the first after two
    seconds, then one every ten, and one when half is done. Any thread may ask.

    clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._doing = ""
        self._since = self._told = clock()
        self._half: set[str] = set()

    def heard(self, stage: str, iteration: int, event: Event) -> None:
        """Take note of what is being done, and that it was told, where `line` gives no line."""
        with self._lock:
            if doing := preparation(event) or event.get("say"):
                self._begin(str(doing))
            elif "stage_started" in event:
                self._begin(work_text(stage, iteration))
            elif "finished" in event or "metrics" in event:
                self._begin("")
            elif "still" in event:
                self._told = self._clock()

    def _begin(self, doing: str) -> None:
        self._doing, self._since = doing, self._clock()
        self._told = self._since + FIRST_SECONDS - EVERY_SECONDS

    def line(self, stage: str, iteration: int, event: Event) -> str:
        """The line that an event with counts is worth now; empty: none."""
        done, total, _ = counted(event)
        if not total:
            return ""
        work, text = work_text(stage, iteration), numbers_text(event)
        with self._lock:
            self._doing = f"{work} {text}"
            half = 2 * done >= total and work not in self._half
            if half:
                self._half.add(work)
            if not half and self._clock() - self._told < EVERY_SECONDS:
                return ""
            self._told = self._clock()
            return self._doing

    def still(self) -> str:
        """The line about work of which nothing was heard for long; empty: there is none."""
        with self._lock:
            now = self._clock()
            # What was begun was told when it began.
            if not self._doing or now - max(self._told, self._since) < EVERY_SECONDS:
                return ""
            self._told = now
            return f"still {self._doing} ({now - self._since:.0f} s)"

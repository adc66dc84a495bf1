"""Displays of a run in progress: live on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from flows.cli.progress import EvaluationRow, IterationRow, Progress, preparation, switch_line
from flows.cli.tables import activity_numbers, interval, number, screen, signed

_PER_SECOND = 4.0
_OWN_LOGGERS = ("earl", "earl_core", "flows", "tasks")


class Display(logging.Handler):
    """Shows a run between `with` and its end, with our own warnings; the flow's libraries keep
    theirs to themselves. `listen` takes the flow's events from any thread."""

    def __init__(self, iterations: int) -> None:
        super().__init__(logging.WARNING)
        self.progress = Progress(iterations)
        self._propagated: dict[str, bool] = {}

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        """Take one event."""
        self.progress.handle(stage, iteration, event)

    def say(self, text: str) -> None:
        """Show what is going on outside the stages."""
        self.progress.say(text)

    def warn(self, text: str) -> None:
        """Show a line that stays."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning of ours."""
        self.warn(f"{record.levelname.lower()}: {record.getMessage()}")

    def __enter__(self) -> Display:
        for name in _OWN_LOGGERS:
            logger = logging.getLogger(name)
            self._propagated[name], logger.propagate = logger.propagate, False
            logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        for name, propagated in self._propagated.items():
            logger = logging.getLogger(name)
            logger.propagate = propagated
            logger.removeHandler(self)


def make_display(iterations: int, plain: bool, console: Console) -> Display:
    """The live display on a terminal, unless plain lines are wanted."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(iterations)
    return LiveDisplay(iterations, console)


class LiveDisplay(Display):
    """A screen that is redrawn a few times a second."""

    def __init__(self, iterations: int, console: Console) -> None:
        super().__init__(iterations)
        self._console = console
        spinner = Spinner("dots")
        self._live = Live(
            console=console,
            refresh_per_second=_PER_SECOND,
            get_renderable=lambda: screen(self.progress.snapshot(), spinner),
            transient=False,
        )

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        super().listen(stage, iteration, event)
        if told := switch_line(iteration, event):
            self._console.print(Text(told, style="cyan"))

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def __enter__(self) -> Display:
        super().__enter__()
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        super().__exit__(*error)


class PlainDisplay(Display):
    """One line per event, for logs and pipes."""

    def __init__(self, iterations: int) -> None:
        super().__init__(iterations)
        self._writing = threading.Lock()
        self._told: set[tuple[str, int]] = set()

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        super().listen(stage, iteration, event)
        if line := self._line(stage, iteration, event):
            self.warn(line)

    def say(self, text: str) -> None:
        super().say(text)
        self.warn(text)

    def warn(self, text: str) -> None:
        with self._writing:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _line(self, stage: str, iteration: int, event: Mapping[str, Any]) -> str:
        metrics = event.get("metrics", {})
        if event.get("finished") and stage == "iteration":
            return f"iteration {iteration}: {iteration_text(IterationRow.of(iteration, metrics))}"
        if event.get("finished") and stage == "evaluation":
            return evaluation_text(EvaluationRow.of(iteration, metrics))
        if told := switch_line(iteration, event) or preparation(event):
            return told
        if event.get("stage_started"):
            return f"iteration {iteration}: {stage} started"
        # Progress comes several times a second; half of the way is enough of it.
        activity = self.progress.snapshot().activity
        half = activity.total and activity.done * 2 >= activity.total
        if half and (stage, iteration) not in self._told:
            self._told.add((stage, iteration))
            return f"iteration {iteration}: {stage} {activity_numbers(activity)}"
        return ""


def iteration_text(row: IterationRow) -> str:
    """An iteration's numbers in one line."""
    parts = [f"return {signed(row.mean_return, 3)}" if row.mean_return is not None else ""]
    parts += [f"{name} {100 * share:.0f} %" for name, share in row.outcomes.items()]
    if row.context_mean is not None:
        most = number(row.context_max, ", max {:.0f}")
        parts.append(f"context {row.context_mean:.0f}{most}")
    if row.rollout_tokens_per_second is not None:
        parts.append(f"rollout {row.rollout_tokens_per_second:,.0f} tokens/s")
    if row.update_tokens_per_second is not None:
        parts.append(f"update {row.update_tokens_per_second:,.0f} tokens/s")
    parts.append(f"{row.seconds:.1f} s")
    return ", ".join(part for part in parts if part)


def evaluation_text(row: EvaluationRow) -> str:
    """An evaluation in one line."""
    parts = [f"return {signed(row.mean_return, 3)}"] if row.mean_return is not None else []
    parts += [f"{name} {interval(value)} %" for name, value in row.outcomes.items()]
    return f"evaluation after {row.version} iterations: {', '.join(parts)}"

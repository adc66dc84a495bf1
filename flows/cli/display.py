"""Displays of a run in progress: live on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from flows.cli.progress import (
    Activity,
    EvaluationRow,
    IterationRow,
    Progress,
    getting_model,
    layout_news,
    preparation,
)
from flows.cli.tables import activity_numbers, interval, number, screen, signed

_PER_SECOND = 4.0
_OWN_LOGGERS = ("earl", "earl_core", "flows", "tasks")


class Display(Protocol):
    """Shows a run. `listen` takes the flow's events from any thread."""

    progress: Progress

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None:
        """Show what is going on outside the stages."""

    def warn(self, text: str) -> None:
        """Show a line that stays."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_display(iterations: int, plain: bool, console: Console) -> Display:
    """The live display on a terminal, unless plain lines are wanted."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(iterations)
    return LiveDisplay(iterations, console)


class _Warnings(logging.Handler):
    """Brings our own warnings to the display; the flow's libraries keep theirs to themselves."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._display.warn(f"{record.levelname.lower()}: {text}")


class _Base:
    """What both displays share: the progress, and our own warnings."""

    def __init__(self, iterations: int) -> None:
        self.progress = Progress(iterations)
        self._handler: _Warnings | None = None
        self._propagated: dict[str, bool] = {}

    def _attach(self, display: Display) -> None:
        self._handler = _Warnings(display)
        for name in _OWN_LOGGERS:
            logger = logging.getLogger(name)
            self._propagated[name] = logger.propagate
            logger.addHandler(self._handler)
            logger.propagate = False

    def _detach(self) -> None:
        for name in _OWN_LOGGERS:
            logger = logging.getLogger(name)
            logger.propagate = self._propagated.get(name, True)
            if self._handler is not None:
                logger.removeHandler(self._handler)


class LiveDisplay(_Base):
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
        self.progress.handle(stage, iteration, event)
        if told := layout_news(iteration, event):
            self._console.print(Text(told, style="cyan"))

    def say(self, text: str) -> None:
        self.progress.say(text)

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def __enter__(self) -> LiveDisplay:
        self._attach(self)
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        self._detach()


class PlainDisplay(_Base):
    """One line per event, for logs and pipes."""

    def __init__(self, iterations: int) -> None:
        super().__init__(iterations)
        self._lock = threading.Lock()
        self._told: set[tuple[str, int]] = set()

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        self.progress.handle(stage, iteration, event)
        line = self._line(stage, iteration, event)
        if line:
            self._write(line)

    def say(self, text: str) -> None:
        self.progress.say(text)
        self._write(text)

    def warn(self, text: str) -> None:
        self._write(text)

    def __enter__(self) -> PlainDisplay:
        self._attach(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._detach()

    def _write(self, line: str) -> None:
        with self._lock:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _line(self, stage: str, iteration: int, event: Mapping[str, Any]) -> str:
        metrics = event.get("metrics", {})
        if event.get("finished") and stage == "iteration":
            return f"iteration {iteration}: {iteration_text(IterationRow.of(iteration, metrics))}"
        if event.get("finished") and stage == "evaluation":
            return evaluation_text(EvaluationRow.of(iteration, metrics))
        if told := layout_news(iteration, event):
            return told
        if preparing := preparation(event):
            return preparing
        if getting := getting_model(event):
            return getting
        if event.get("stage_started"):
            return f"iteration {iteration}: {stage} started"
        # Progress comes several times a second; half of the way is enough of it.
        activity: Activity = self.progress.snapshot().activity
        half = activity.total and activity.done and activity.done * 2 >= activity.total
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

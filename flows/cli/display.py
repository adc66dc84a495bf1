"""Displays of a flow while it runs.

On a terminal the display of a run in progress is live; elsewhere it is one plain line per event, or
a line of JSON for each iteration, or nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from earl_core.system.plural import plural
from flows.cli.arguments import Show
from flows.cli.responsive_tables import BarLine
from flows.cli.tables import duration, evaluation_table, iteration_table, json_line
from flows.cli.terminal import readable
from flows.progress import Event, Pace, counted, numbers_text, preparation, work_text
from tasks.reports.lines import Line, evaluation_text, iteration_text


def switch_line(iteration: int, event: Event) -> str:
    """A line about a stage that takes another stage deployment, or is repeated, or about what was
    chosen for the run; empty: the event says nothing of the kind."""
    if "chosen" in event:
        return str(event["chosen"])
    told = event.get("switched") or event.get("repeated")
    return f"iteration {iteration}: {told}" if told else ""


_PER_SECOND = 4.0
_ITERATIONS_SHOWN = 8
_EVALUATIONS_SHOWN = 4
_OWN_LOGGERS = ("earl", "earl_core", "flows", "tasks")


class Display(logging.Handler):
    """Shows a run between `with` and its end, with our own warnings; the flow's libraries keep
    theirs to themselves."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._propagated: dict[str, bool] = {}

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        """Show one event of the flow, as `earl_core.control.worker_groups.Progress`; called from
        any thread."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Show what is going on outside the stages."""
        raise NotImplementedError

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


def make_display(
    console: Console,
    show: Show,
    iterations: int = 1,
    done: Sequence[Line] = (),
    evaluations: Sequence[Line] = (),
) -> Display:
    """The display that is wanted; a live one on a terminal only, elsewhere plain lines. iterations:
    of the run, in all. done, evaluations: what earlier attempts of it have done."""
    if show == "json":
        return JsonDisplay()
    if show == "quiet":
        return QuietDisplay()
    if show == "plain" or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay()
    return LiveDisplay(console, iterations, done, evaluations)


class LiveDisplay(Display):
    """A screen that is redrawn a few times a second."""

    def __init__(
        self,
        console: Console,
        iterations: int,
        done: Sequence[Line] = (),
        evaluations: Sequence[Line] = (),
    ) -> None:
        super().__init__()
        self._console = console
        self._changing = threading.Lock()
        self._began = time.monotonic()
        self._ends: deque[float] = deque(maxlen=_ITERATIONS_SHOWN)
        self._iterations = iterations
        self._rows = list(done[-_ITERATIONS_SHOWN:])
        self._evaluations = list(evaluations)
        self._stage, self._preparing = "starting", ""
        self._numbers: Event = {}
        self._stages: dict[tuple[int, str], Event] = {}
        self._spinner = Spinner("dots")
        self._size = console.size
        self._live = Live(
            console=console, refresh_per_second=_PER_SECOND, get_renderable=self.screen
        )

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        if told := switch_line(iteration, event):
            self._console.print(Text(told, style="cyan"))
            return
        with self._changing:
            if "finished" in event:
                self._add(stage, {"iteration": iteration, **event["metrics"]})
                self._end(lambda number, name: number == iteration)
            elif "downloading" in event or "building" in event:
                self._show(preparation(event), event)
            elif preparing := preparation(event):
                self._preparing = preparing
            elif "say" in event:
                self._show(event["say"])
            elif "metrics" in event:
                self._end(lambda number, name: (number, name) == (iteration, stage))
            elif "still" not in event:
                self._preparing = ""
                self._stages[iteration, stage] = {} if "stage_started" in event else event

    def _add(self, stage: str, line: Line) -> None:
        if stage == "evaluation":
            self._evaluations.append(line)
        else:
            self._ends.append(time.monotonic())
            # One that is repeated takes the place of its earlier attempt.
            before = [row for row in self._rows if row["iteration"] < line["iteration"]]
            self._rows = [*before, line][-_ITERATIONS_SHOWN:]

    def _end(self, over: Callable[[int, str], bool]) -> None:
        """Forget the stages that are over; the last one is shown until another begins."""
        left = {key: event for key, event in self._stages.items() if not over(*key)}
        if self._stages and not left:
            self._show([*self._stages][-1][1])
        self._stages = left

    def _show(self, stage: str, numbers: Event | None = None) -> None:
        self._stage, self._preparing, self._numbers = stage, "", numbers or {}
        self._stages = {}

    def say(self, text: str) -> None:
        with self._changing:
            self._show(text)

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def screen(self) -> RenderableType:
        """All that is shown now."""
        self._redraw_if_resized()
        with self._changing:
            parts: list[RenderableType] = [self._head(), *self._activities()]
            if self._rows:
                parts.append(iteration_table(self._rows))
            if self._evaluations:
                parts.append(evaluation_table(self._evaluations[-_EVALUATIONS_SHOWN:]))
            return Group(*parts)

    def _redraw_if_resized(self) -> None:
        """Terminals break the lines of a narrower window anew, each in its own way, so that nobody
        knows where they stand: the screen is begun anew."""
        before, self._size = self._size, self._console.size
        if self._console.is_terminal and before != self._size:
            self._console.control(Control.clear(), Control.home())

    def _head(self) -> BarLine:
        finished = self._rows[-1]["iteration"] + 1 if self._rows else 0
        times = f"{duration(time.monotonic() - self._began)} so far"
        left = self._iterations - finished
        if left > 0 and len(self._ends) > 1:
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            times += f", about {duration(left * pace)} left"
        text = f"{finished} of {plural(self._iterations, 'iteration')}"
        done, total = finished, self._iterations
        return BarLine(Text(text, style="bold"), Text(times, style="dim"), total, done)

    def _activities(self) -> Iterator[BarLine]:
        """One line for each stage that goes on, by iteration where there are several."""
        several = len({number for number, _ in self._stages}) > 1
        doing = [
            (f"{number}: {stage}" if several else stage, event)
            for (number, stage), event in sorted(self._stages.items(), key=lambda each: each[0])
        ] or [(self._stage, self._numbers)]
        for place, (stage, event) in enumerate(doing):
            preparing = self._preparing if place == len(doing) - 1 else ""
            text = ": ".join(part for part in (stage, preparing) if part)
            done, total, _ = counted(event)
            numbers = Text(numbers_text(event), style="dim")
            yield BarLine(Text(text, style="bold cyan"), numbers, total, done, self._spinner)

    def __enter__(self) -> Display:
        super().__enter__()
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        super().__exit__(*error)


class PlainDisplay(Display):
    """One line per event, for logs and pipes."""

    def __init__(self) -> None:
        super().__init__()
        self._pace = Pace()

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        if line := self._line(stage, iteration, event):
            self.warn(line)

    def say(self, text: str) -> None:
        self.warn(text)

    def warn(self, text: str) -> None:
        # In one piece: several threads write.
        print(f"{readable(text)}\n", end="", flush=True)

    def _line(self, stage: str, iteration: int, event: Event) -> str:
        self._pace.heard(stage, iteration, event)
        if "finished" in event:
            line = {"iteration": iteration, **event["metrics"]}
            if stage == "evaluation":
                return evaluation_text(line)
            return f"iteration {iteration}: {iteration_text(line)}"
        if text := self._pace.line(stage, iteration, event):
            return text
        if told := event.get("still") or event.get("say") or switch_line(iteration, event):
            return str(told)
        if waited := preparation(event):
            return waited
        return f"{work_text(stage, iteration)} started" if "stage_started" in event else ""


class QuietDisplay(Display):
    """Warnings on stderr."""

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        """Say nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def warn(self, text: str) -> None:
        print(f"{readable(text)}\n", end="", file=sys.stderr, flush=True)


class JsonDisplay(QuietDisplay):
    """Besides, a line of JSON on stdout for each iteration and each evaluation that is finished."""

    def listen(self, stage: str, iteration: int, event: dict[str, Any]) -> None:
        if "finished" in event:
            told = json_line({"iteration": iteration, **event["metrics"]}, stage)
            print(f"{told}\n", end="", flush=True)

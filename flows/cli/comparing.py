"""`earl compare`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from earl_core.comparison import EqualPrompt, recorded_runs
from earl_core.comparison.equal_prompts import Played
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from flows.cli.curve import Series, draw
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from flows.cli.tables import make_console, rows_table
from tasks.reports.compare_page import Compared, compare, write_page
from tasks.reports.compare_page.compared import facts
from tasks.reports.compare_page.page import seconds_text
from tasks.reports.lines import Line, interval, mean_return, outcome_names, return_text

_MARKS = f"●x+o*#%@{ascii_lowercase}{ascii_uppercase}"
_MOST_PROMPTS = 200
_MOST_EPISODES = 4
_LONGEST = 600
"""Characters of a text that is printed; the page has all of it."""
_NARROW = 90


def compare_runs(runs: Sequence[str], runs_directory: str, html: Path | None, prompts: int) -> None:
    """Print the comparison, and write its page where one is asked for. prompts: how many of those
    that all have played are printed with their episodes.

    Raises `ConfigError` for fewer than two runs, one that is unknown or given twice, runs without a
    common metric, and a page that cannot be written; `RunDamaged` for a run of another format.
    """
    if len(runs) < 2:
        raise ConfigError("a comparison needs two runs or more: name another one")
    recorded = recorded_runs([find_run(run, runs_directory) for run in runs])
    lines = [(iterations_of(run.path), evaluations_of(run.path)) for run in recorded]
    found = compare(recorded, lines, _MOST_PROMPTS, _MOST_EPISODES)
    written = _write(found, html) if html is not None else ""
    console = make_console()
    _print(found, prompts, console)
    for run in recorded:
        for text in run.redaction.told():
            console.print(f"{run.label}: {text}", style="yellow")
    if written:
        console.print(f"\n{written}")


def _write(found: Compared, html: Path) -> str:
    try:
        page = write_page(found, html)
    except OSError as error:
        raise ConfigError(
            f"the page {html} cannot be written ({error.strerror}): choose another with --html"
        ) from None
    shown = plural(page.prompts, "equal prompt")
    return f"{page.path}: {page.bytes / 1e6:.1f} MB, {shown}; open it in a browser"


def _print(found: Compared, prompts: int, console: Console) -> None:
    about = [facts(*each) for each in zip(found.labels, found.records, strict=True)]
    console.print(rows_table(about, {"run": "bold"}))
    console.print("\nSettings that differ", style="bold")
    if found.settings:
        rows = [
            {"setting": name, **dict(zip(found.labels, values, strict=True))}
            for name, values in found.settings.items()
        ]
        console.print(rows_table(rows, {"setting": "bold"}))
    else:
        console.print("None.")
    _print_curves(found, console)
    console.print("\nSeconds by stage, of an iteration in the mean", style="bold")
    seconds = [
        {"stage": stage, **dict(zip(found.labels, map(seconds_text, own), strict=True))}
        for stage, own in found.seconds.items()
    ]
    console.print(rows_table(seconds, {"stage": "bold"}))
    for prompt in found.prompts[:prompts]:
        _print_episodes(prompt, found.labels, console)
    if prompts and not found.prompts:
        console.print("\nThey have kept no episodes of equal prompts.")
    for text in found.damaged:
        console.print(text, style="yellow")


def _print_curves(found: Compared, console: Console) -> None:
    """The training's returns, or those of evaluations where there are several, and the newest
    evaluations with their intervals."""
    trained = [(records.iterations, 1) for records in found.records]
    evaluated = [(records.evaluations, 0) for records in found.records]
    for title, lines in (("Return in training", trained), ("Return, held out", evaluated)):
        series = [
            Series(label, mark, _curve(own, mean_return, later))
            for label, mark, (own, later) in zip(found.labels, _MARKS, lines, strict=False)
        ]
        if any(len(one.points) > 1 for one in series):
            console.print(f"\n{title}", style="bold")
            console.print(draw(series, y_text="{:+.2f}".format))
    last = [
        (label, own[-1]) for label, (own, _) in zip(found.labels, evaluated, strict=True) if own
    ]
    if last:
        names = outcome_names([line for _, line in last])
        rows = [
            {
                "run": label,
                "evaluation": str(line["iteration"]),
                "return (95 %)": return_text(line),
                **{f"{name} % (95 %)": interval(line, name) for name in names},
            }
            for label, line in last
        ]
        console.print("\nNewest evaluations", style="bold")
        console.print(rows_table(rows, {"run": "bold"}))


def _curve(
    lines: Sequence[Line], number: Callable[[Line], float | None], later: int
) -> tuple[tuple[float, float], ...]:
    found = ((float(line["iteration"] + later), number(line)) for line in lines)
    return tuple((done, value) for done, value in found if value is not None)


def _print_episodes(prompt: EqualPrompt, labels: Sequence[str], console: Console) -> None:
    """One episode of each run, side by side where the window is wide enough."""
    where = f" of {prompt.environment}" if prompt.environment else ""
    console.print(f"\nEpisodes of an equal prompt{where}", style="bold")
    panels = [
        _panel(label, own[0]) for label, own in zip(labels, prompt.episodes, strict=True) if own
    ]
    width = console.width // max(1, len(panels)) - 1
    if width * len(panels) < _NARROW:
        console.print(Group(*panels))
    else:
        console.print(Columns(panels, width=width))


def _panel(label: str, episode: Played) -> RenderableType:
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:+.3g}"
    told = [f"iteration {episode.iteration}", episode.outcome, reward]
    parts: list[RenderableType] = []
    for turn in range(len(episode.rewards)):
        parts.append(Text(_cut(episode.texts[2 * turn]), style="dim"))
        parts.append(Text(f"> {_cut(episode.texts[2 * turn + 1])}"))
    parts += [Text(_cut(text), style="dim") for text in episode.texts[2 * len(episode.rewards) :]]
    title = Text(_cut(f"{label}: {', '.join(text for text in told if text)}"))
    return Panel(Group(*parts), title=title, title_align="left")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"

"""The curves of `no_limit`: how episodes grow, and what they earn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.no_limit_runs import Finished

_COLOURS = {"fixed": "#b03030", "truncated": "#b8860b", "earl": "#2a7f3f", "by hand": "#888888"}


def draw(runs: Sequence[Finished], target: Path, cap_gib: float) -> None:
    """Tokens of an episode and return by iteration; a line a run, a cross where it was killed, a
    dot where a layout changed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (contexts, returns) = pyplot.subplots(1, 2, figsize=(9.8, 3.8))
    for axis, metric, label in (
        (contexts, "rollout/context/mean", "tokens of an episode, mean"),
        (returns, "rollout/return/mean", "return: floors passed, mean"),
    ):
        for run in runs:
            _line(axis, run, metric)
        axis.set_xlabel("iteration")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    _legend(returns, runs)
    contexts.set_title(f"memory capped at {cap_gib:g} GiB", fontsize=10)
    returns.set_title("same seeds, same cap", fontsize=10)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _line(axis: Any, run: Finished, metric: str) -> None:
    values = run.series(metric)
    colour = _COLOURS[_family(run)]
    style = "--" if run.arm.name == "by hand" else "-"
    axis.plot(range(len(values)), values, style, color=colour, linewidth=1.4, alpha=0.85)
    if not run.survived and values:
        axis.plot(len(values) - 1, values[-1], "x", color=colour, markersize=9, markeredgewidth=2)
    if run.arm.name == "earl":
        places = [k for k in run.switches() if k < len(values)]
        axis.plot(places, [values[k] for k in places], "o", color=colour, markersize=4)


def _legend(axis: Any, runs: Sequence[Finished]) -> None:
    from matplotlib.lines import Line2D

    texts: dict[str, str] = {}
    for run in runs:
        family = _family(run)
        if family == "fixed":
            texts[family] = "fixed layout (x: killed)"
        elif family == "truncated":
            texts[family] = f"fixed, cut after {run.arm.cut_at} floors"
        elif family == "earl":
            texts[family] = "EARL, nothing cut (dots: new layout)"
        else:
            texts[family] = "fixed by hand for the longest"
    lines = [
        Line2D([], [], color=_COLOURS[f], linestyle="--" if f == "by hand" else "-") for f in texts
    ]
    axis.legend(lines, list(texts.values()), loc="upper left", fontsize=8, frameon=False)


def _family(run: Finished) -> str:
    return "truncated" if run.arm.cut_at else run.arm.name

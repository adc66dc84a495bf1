"""The charts of a run, as plain data that the page hands to plotly.

A chart has `title`, `y` (its axis, with the unit), `kind` (`lines`, or `bars`, which are stacked),
`log` for a logarithmic axis, `series`, and `marks`: iterations with an upright line. A series has
`name`, `x`, `y`, and where it has intervals `low` and `high`; `held_out`: it is of evaluations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from earl_core.deployment.stages import SELECTABLE, STAGES
from earl_core.rollout.rollout_stats import wilson_interval
from tasks.reports.intervals import half_interval
from tasks.reports.run_page.records import Line, RunRecords

Chart = dict[str, Any]
Series = dict[str, Any]
Interval = Callable[[Line], tuple[float, float]]

_GIB = 2.0**30
_FAR = 10.0
_OF_PART = re.compile(r"rollout/of/(.+)/return/mean")
_OUTCOME = re.compile(r"rollout/outcome/(.+)")
_HELD_OUT = re.compile(r"outcome/(.+)/share")
_SUITE = re.compile(r"suite/(.+)/pass_at_(\d+)")


def sections(records: RunRecords) -> list[dict[str, Any]]:
    """All charts that the run has numbers for: `title` and `charts` of each section."""
    lines, evaluations = records.iterations, records.evaluations
    found = [
        ("Learning", [*_learning(lines, evaluations), *_suites(evaluations)]),
        ("Contexts and turns", list(_episodes(lines))),
        ("Time", list(_time(lines))),
        ("Memory", list(_memory(lines))),
        ("Health of the update", list(_health(lines))),
    ]
    return [
        {"title": title, "charts": whole}
        for title, charts in found
        if (whole := [chart for chart in charts if chart["series"]])
    ]


def _learning(lines: Sequence[Line], evaluations: Sequence[Line]) -> Iterator[Chart]:
    yield _chart(
        "Return",
        "mean return of an episode",
        _series("training", lines, "rollout/return/mean", _mean_interval("rollout/return")),
        _series("reward, as trained", lines, "reward/mean") if _rewards_differ(lines) else None,
        _held_out("held out", evaluations, "return/mean", _mean_interval("return")),
    )
    for title, found, rows, part in (
        ("Outcomes in training", _OUTCOME, lines, ""),
        ("Outcomes of held-out episodes", _HELD_OUT, evaluations, "/share"),
    ):
        make = _held_out if part else _series
        yield _chart(
            title,
            "share of the episodes, %",
            *(
                make(name, rows, key, _share_interval(key, part), scale=100.0)
                for name, key in _named(rows, found)
            ),
        )
    yield _chart(
        "Return by environment",
        "mean return of an episode",
        *(
            _series(label, lines, key, _mean_interval(key.removesuffix("/mean")))
            for label, key in _named(lines, _OF_PART)
        ),
    )


def _suites(evaluations: Sequence[Line]) -> Iterator[Chart]:
    names = {
        found[1]: None for line in evaluations for key in line if (found := _SUITE.fullmatch(key))
    }
    for label in names:
        rates = sorted(
            {int(found[2]) for line in evaluations for key in line
             if (found := _SUITE.fullmatch(key)) and found[1] == label}
        )  # fmt: skip
        keys = {k: f"suite/{label}/pass_at_{k}" for k in rates}
        yield _chart(
            f"Suite {label}",
            "prompts passed, %",
            *(
                _held_out(f"pass@{k}", evaluations, key, _share_interval(key, ""), scale=100.0)
                for k, key in keys.items()
            ),
        )


def _episodes(lines: Sequence[Line]) -> Iterator[Chart]:
    context = "rollout/context"
    yield _chart(
        "Context",
        "tokens of an episode",
        *(
            _series(name, lines, f"{context}/{key}")
            for name, key in (("mean", "mean"), ("95th percentile", "p95"), ("longest", "max"))
        ),
    )
    yield _chart("Turns", "turns of an episode", _series("mean", lines, "rollout/turns/mean"))
    yield _chart(
        "Samples per episode",
        "samples of an episode",
        _series("mean", lines, "rollout/samples_per_episode"),
    )
    failing = [
        _series(name, lines, f"rollout/episodes_{name}")
        for name in ("failed", "retried")
        if any(line.get(f"rollout/episodes_{name}") for line in lines)
    ]
    yield _chart("Failed episodes", "episodes of an iteration", *failing)
    tools = [
        _series(name, lines, f"rollout/tool_{name}")
        for name in ("calls", "errors")
        if any(line.get(f"rollout/tool_{name}") for line in lines)
    ]
    yield _chart("Tools", "calls of an iteration", *tools)


def _time(lines: Sequence[Line]) -> Iterator[Chart]:
    stages = [_series(stage, lines, f"{stage}/stage_seconds") for stage in STAGES]
    yield {**_chart("Stages", "seconds of an iteration", *stages), "kind": "bars"}
    yield _chart(
        "Speed",
        "tokens/s",
        *(_series(stage, lines, f"{stage}/tokens_per_second") for stage in ("rollout", "update")),
        marks=_switches(lines),
    )


def _memory(lines: Sequence[Line]) -> Iterator[Chart]:
    for stage in SELECTABLE:
        chart = _chart(
            f"Memory of {stage}",
            "peak, GiB",
            *(
                _series(name, lines, f"selector/{stage}/{key}", scale=1 / _GIB)
                for name, key in (
                    ("measured", "measured_peak_bytes"),
                    ("predicted", "predicted_peak_bytes"),
                    ("budget", "budget_bytes"),
                )
            ),
            marks=_switches(lines, stage),
        )
        seen = [value for series in chart["series"] for value in series["y"] if value > 0]
        # Far below its budget, a peak is a line at the bottom of any other axis.
        yield {**chart, "log": bool(seen) and max(seen) > _FAR * min(seen)}


def _health(lines: Sequence[Line]) -> Iterator[Chart]:
    differences = [
        _series(name, lines, f"update/mismatch_{key}")
        for name, key in (("mean", "mean"), ("95th percentile", "p95"), ("largest", "max"))
    ]
    title = "Mismatch of rollout and update"
    yield {**_chart(title, "difference of log-probs, nats", *differences), "log": True}
    for title, axis, key in (
        ("Gradient", "norm before clipping", "grad_norm"),
        ("Entropy", "nats per token", "entropy"),
        ("KL of the update", "nats per token", "update_kl"),
        ("Clipped tokens", "share of the tokens, %", "clip_fraction"),
    ):
        scale = 100.0 if key == "clip_fraction" else 1.0
        yield _chart(title, axis, _series("update", lines, f"update/{key}", scale=scale))


def _chart(title: str, y: str, *series: Series | None, marks: Sequence[int] = ()) -> Chart:
    shown = [each for each in series if each is not None and each["x"]]
    return {"title": title, "y": y, "kind": "lines", "series": shown, "marks": list(marks)}


def _series(
    name: str, lines: Sequence[Line], key: str, interval: Interval | None = None, scale: float = 1.0
) -> Series:
    """One line of a chart, of the lines that have its number; the share of an outcome is 0 where
    others are told and it is not."""
    pattern = next((each for each in (_OUTCOME, _HELD_OUT) if each.fullmatch(key)), None)
    if pattern is not None:
        told = (line for line in lines if any(map(pattern.fullmatch, line)))
        rows = [line if key in line else {**line, key: 0.0} for line in told]
    else:
        rows = [line for line in lines if key in line]
    made: Series = {
        "name": name,
        "x": [int(line["iteration"]) for line in rows],
        "y": [_short(scale * line[key]) for line in rows],
    }
    if interval is not None:
        spans = [interval(line) for line in rows]
        made |= {
            "low": [_short(scale * low) for low, _ in spans],
            "high": [_short(scale * high) for _, high in spans],
        }
    return made


def _held_out(*arguments: Any, **named: Any) -> Series:
    return {**_series(*arguments, **named), "held_out": True}


def _short(value: float) -> float:
    """Six digits: more are no news to the eye, and cost bytes."""
    return float(f"{value:.6g}")


def _mean_interval(key: str) -> Interval:
    """95 % of a mean of episodes, by their standard deviation."""
    episodes = key.removesuffix("return") + "episodes"

    def interval(line: Line) -> tuple[float, float]:
        error = half_interval(line.get(f"{key}/std", 0.0), line.get(episodes, 0)) or 0.0
        return line[f"{key}/mean"] - error, line[f"{key}/mean"] + error

    return interval


def _share_interval(key: str, part: str) -> Interval:
    """95 % of a share: as the run has it, else Wilson's."""
    base = key.removesuffix(part) if part else key

    def interval(line: Line) -> tuple[float, float]:
        if f"{base}/low" in line:
            return line[f"{base}/low"], line[f"{base}/high"]
        episodes = int(line.get("rollout/episodes", 0))
        return wilson_interval(line[key] * episodes, episodes)

    return interval


def _named(lines: Sequence[Line], pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(name, key) of all metrics that match, in the order of their first appearance."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return [(found[1], key) for key in keys if (found := pattern.fullmatch(key))]


def _rewards_differ(lines: Sequence[Line]) -> bool:
    """Tell whether reward functions make something else of the environment's returns."""
    names = ("reward/mean", "rollout/return/mean")
    pairs = [[line[name] for name in names] for line in lines if all(n in line for n in names)]
    return any(abs(one - other) > 1e-6 for one, other in pairs)


def _switches(lines: Sequence[Line], *stages: str) -> list[int]:
    return [
        int(line["iteration"])
        for line in lines
        if any(line.get(f"selector/{stage}/switched") for stage in stages or SELECTABLE)
    ]

"""Charts that hold the curves of several runs: those of `earl report`, put together by what they
show. A series also has `run`, its run's number, by which it gets its colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.reports.compare_page.compared import Compared
from tasks.reports.run_page.charts import Chart, Series, sections

_TOGETHER = {"Outcomes in training": "Outcome", "Outcomes of held-out episodes": "Outcome"}
"""Charts whose series of one name belong together: those of training and of evaluations."""

_RETURNS = ("training", "held out")
_LEFT_OUT = ("Stages", "Memory of")
"""Stages have a chart of their own here; of memory only what was measured is a run's own."""


def compared_sections(found: Compared) -> list[dict[str, Any]]:
    """All charts that at least one run has numbers for; `title` and `charts` of each section."""
    together: dict[str, dict[str, Chart]] = {}
    for number, records in enumerate(found.records):
        for section in sections(records):
            charts = together.setdefault(section["title"], {})
            for chart, series in _curves(section["charts"]):
                title = _title(chart, series)
                own = {**chart, "title": title, "series": [], "marks": []}
                charts.setdefault(title, own)["series"].append(
                    _of_run(series, number, found.labels[number])
                )
    found_sections: list[dict[str, Any]] = [
        {"title": title, "charts": list(charts.values())} for title, charts in together.items()
    ]
    times = [each for each in found_sections if each["title"] == "Time"]
    if found.seconds:
        if not times:
            found_sections.append({"title": "Time", "charts": []})
            times = found_sections[-1:]
        times[0]["charts"].insert(0, _seconds(found))
    return [section for section in found_sections if section["charts"]]


def _curves(charts: list[Chart]) -> Iterator[tuple[Chart, Series]]:
    for chart in charts:
        if not chart["title"].startswith(_LEFT_OUT):
            for series in chart["series"]:
                yield chart, series


def _title(chart: Chart, series: Series) -> str:
    title, name = chart["title"], series["name"]
    if title in _TOGETHER:
        return f"{_TOGETHER[title]}: {name}"
    if title == "Return" and name in _RETURNS:
        return title
    alone = name == "mean" or (name == "update" and title != "Speed")
    return title if alone else f"{title}: {name}"


def _of_run(series: Series, number: int, label: str) -> Series:
    """A run's curve: of training a line, of evaluations points with intervals."""
    held_out = bool(series.get("held_out"))
    kept = dict(series) if held_out else {key: series[key] for key in ("x", "y")}
    return {**kept, "run": number, "name": f"{label}, held out" if held_out else label}


def _seconds(found: Compared) -> Chart:
    series = []
    for number, label in enumerate(found.labels):
        own = {stage: each[number] for stage, each in found.seconds.items()}
        known = {stage: each for stage, each in own.items() if each is not None}
        series.append(
            {
                "name": label,
                "run": number,
                "x": list(known),
                "y": [round(each.mean, 4) for each in known.values()],
                "low": [round(each.mean - (each.error or 0.0), 4) for each in known.values()],
                "high": [round(each.mean + (each.error or 0.0), 4) for each in known.values()],
            }
        )
    return {
        "title": "Seconds by stage",
        "y": "mean seconds of an iteration",
        "kind": "categories",
        "series": series,
        "marks": [],
    }

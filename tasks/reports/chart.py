"""Charts as drawings (SVG), for pages that have no files beside them and for MLflow.

A run's choices are one of them: predicted against measured, and where stage deployments switched.
MLflow draws a metric a chart; here a stage's two lines share one.

One is made after each iteration, so it is written here in a millisecond; a plotting library takes a
second to import and 150 ms a picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from earl_core.deployment.stages import SELECTABLE
from tasks.reports.lines import Line

_MOST_POINTS = 400
WIDTH, HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 40, 40
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by the colour-blind, too."""
_LEGEND_WIDTH = 130
MOST_CURVES = (WIDTH - _LEFT - _RIGHT) // _LEGEND_WIDTH
"""The legend holds no more."""

Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """One line of a chart. points: x, y. style: `dotted` is marks only."""

    name: str
    points: Points
    style: Literal["solid", "dashed", "dotted"] = "solid"


def chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    within: Sequence[float] = (),
    marks: Sequence[float] = (),
) -> str:
    """An SVG drawing of curves over the number of iterations done. within: values that the upright
    axis spans in any case. marks: where thin upright lines stand."""
    curves = [curve._replace(points=_thinned(curve.points)) for curve in curves if curve.points]
    ticks_x = _ticks(
        [x for curve in curves for x, _ in curve.points] + [*marks] or [0.0], whole=True
    )
    ticks_y = _ticks([y for curve in curves for _, y in curve.points] + [*within] or [0.0])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - ticks_x[0]) / (ticks_x[-1] - ticks_x[0])
        up = (y - ticks_y[0]) / (ticks_y[-1] - ticks_y[0])
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="16" font-size="14">{escape(title)}</text>',
        _text(WIDTH / 2, HEIGHT - 6, "iterations done", "middle"),
        _text(8, _TOP - 8, unit, "start"),
    ]
    for y in ticks_y:
        left, height = at(ticks_x[0], y)
        parts.append(_line((left, height), (WIDTH - _RIGHT, height), "#ddd"))
        parts.append(_text(left - 6, height + 4, f"{y:g}", "end"))
    for x in ticks_x:
        place, bottom = at(x, ticks_y[0])
        parts.append(_line((place, bottom), (place, bottom + 4), "#333"))
        parts.append(_text(place, bottom + 17, f"{x:g}", "middle"))
    for mark in marks:
        parts.append(_line(at(mark, ticks_y[0]), at(mark, ticks_y[-1]), "#888"))
    for number, curve in enumerate(curves):
        places = [at(*point) for point in curve.points]
        parts += _drawn(places, _COLORS[number % len(_COLORS)], curve.style)
        left = WIDTH - _RIGHT - _LEGEND_WIDTH * (len(curves) - number)
        parts.append(
            f'<rect x="{left}" y="24" width="10" height="10" '
            f'fill="{_COLORS[number % len(_COLORS)]}"/>'
        )
        parts.append(_text(left + 15, 33, curve.name[:18], "start"))
    return "".join([*parts, "</svg>"])


def _drawn(places: Points, color: str, style: str) -> list[str]:
    if style == "dotted" or len(places) == 1:
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="6 4"' if style == "dashed" else ""
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>']


def _thinned(points: Points) -> Points:
    """Thin a curve to at most so many points, with the means of those that are left out."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = (points[start : start + size] for start in range(0, len(points), max(1, size)))
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Round numbers around the values, about six of them, at least two."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - (0 if whole else 0.5), high + (1 if whole else 0.5)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _line(start: tuple[float, float], end: tuple[float, float], color: str) -> str:
    (x, y), (x2, y2) = start, end
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


_PANELS = (("seconds", "seconds", 1.0), ("peak_bytes", "peak, GiB", 2.0**30))


def selector_chart(lines: Sequence[Line]) -> str | None:
    """A drawing (SVG) with a row for each stage, seconds on the left and peak memory on the right;
    a thin upright line wherever the stage switched.

    lines: the metrics of finished iterations, ascending, as metrics.jsonl holds them. None when
    they say nothing of any stage.
    """
    stages = [
        stage for stage in SELECTABLE if any(f"selector/{stage}/switched" in x for x in lines)
    ]
    if not stages:
        return None
    width, height = WIDTH * len(_PANELS), HEIGHT * len(stages)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">']
    for row, stage in enumerate(stages):
        switches = [
            line["iteration"] + 1 for line in lines if line.get(f"selector/{stage}/switched")
        ]
        for column, (name, unit, scale) in enumerate(_PANELS):
            # A stage's own seconds are what it measured.
            own = f"{stage}/seconds" if name == "seconds" else f"selector/{stage}/measured_{name}"
            curves = [
                Curve("measured", _points(lines, own, scale)),
                Curve(
                    "predicted",
                    _points(lines, f"selector/{stage}/predicted_{name}", scale),
                    "dashed",
                ),
            ]
            drawn = chart(f"{stage}: {unit}", unit, curves, within=(0.0,), marks=switches)
            parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">{drawn}</g>')
    return "".join([*parts, "</svg>"])


def _points(lines: Sequence[Line], key: str, scale: float) -> Points:
    return [(line["iteration"] + 1, line[key] / scale) for line in lines if key in line]

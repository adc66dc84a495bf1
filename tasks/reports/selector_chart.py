"""One picture of a run's choices: predicted against measured, and where stage deployments switched.

MLflow draws a metric a chart; here a stage's two lines share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from tasks.reports.selector_metrics import CHOSEN_STAGES

_WIDTH, _HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 34, 26
_STYLES = {
    "measured": 'stroke="#1f6feb" stroke-width="2"',
    "predicted": 'stroke="#d1570a" stroke-width="1.6" stroke-dasharray="5 3"',
}
_PANELS = (("seconds", "seconds", 1.0), ("peak_bytes", "peak, GiB", 2.0**30))

Points = list[tuple[float, float]]


def selector_chart(lines: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of a row for each stage, seconds on the left and peak memory on the right.

    lines: the metrics of finished iterations, ascending, as metrics.jsonl holds them. Empty when
    they say nothing of any stage.
    """
    rows = [
        stage for stage in CHOSEN_STAGES if any(f"selector/{stage}/switched" in x for x in lines)
    ]
    if not rows:
        return ""
    first, last = lines[0]["iteration"], lines[-1]["iteration"]
    width, height = len(_PANELS) * _WIDTH, len(rows) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, stage in enumerate(rows):
        for column, (name, unit, scale) in enumerate(_PANELS):
            place = f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">'
            panel = _panel(lines, stage, name, f"{stage}: {unit}", scale, (first, last))
            parts += [place, *panel, "</g>"]
    return "\n".join([*parts, "</svg>"])


def _panel(
    lines: Sequence[Mapping[str, Any]],
    stage: str,
    name: str,
    title: str,
    scale: float,
    span: tuple[float, float],
) -> list[str]:
    """One pair of axes from 0 to the largest value; a thin line wherever the stage switched."""
    series = {
        kind: [
            (line["iteration"], line[key] / scale)
            for line in lines
            if (key := f"selector/{stage}/{kind}_{name}") in line
        ]
        for kind in _STYLES
    }
    top = max((y for points in series.values() for _, y in points), default=0.0) or 1.0
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def across(iteration: float) -> float:
        return _LEFT + (right - _LEFT) * (iteration - span[0]) / max(span[1] - span[0], 1)

    def up(value: float) -> float:
        return bottom - (bottom - _TOP) * value / top

    parts = [_text(_LEFT, 14, title, 'font-weight="bold"')]
    for share in (0.0, 0.5, 1.0):
        y = up(share * top)
        parts.append(_line(_LEFT, y, right, y, 'stroke="#e3e3e3"'))
        parts.append(_text(_LEFT - 6, y + 4, f"{share * top:,.3g}", 'text-anchor="end"'))
    for iteration, anchor in zip(span, ("start", "end"), strict=True):
        parts.append(
            _text(across(iteration), bottom + 16, f"{iteration:g}", f'text-anchor="{anchor}"')
        )
    for line in lines:
        if line.get(f"selector/{stage}/switched"):
            x = across(line["iteration"])
            parts.append(_line(x, _TOP, x, bottom, 'stroke="#888" stroke-width="1"'))
    for place, (kind, style) in enumerate(_STYLES.items()):
        x = right - 190 + 95 * place
        parts += [_line(x, 11, x + 22, 11, style), _text(x + 27, 14, kind)]
        parts += _curve([(across(x), up(y)) for x, y in series[kind]], style)
    return parts


def _curve(points: Points, style: str) -> list[str]:
    if len(points) == 1:
        x, y = points[0]
        points = [(x - 2, y), (x + 2, y)]
    if not points:
        return []
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" {style}/>']


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

"""One picture of a run's choices: predicted against measured, and where stage deployments switched.

MLflow draws a metric a chart; here a stage's two lines share one.
"""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.deployment.stages import SELECTABLE
from tasks.reports.chart import HEIGHT, WIDTH, Curve, Points, chart
from tasks.reports.lines import Line

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

"""One picture of a run's choices: predicted against measured, and where stage deployments switched.

MLflow draws a metric a chart; here a stage's two lines share one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earl_core.deployment.stages import SELECTABLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = {"measured": "-", "predicted": "--"}
_PANELS = (("seconds", "seconds", 1.0), ("peak_bytes", "peak, GiB", 2.0**30))


def selector_chart(lines: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A row for each stage, seconds on the left and peak memory on the right; a thin upright line
    wherever the stage switched.

    lines: the metrics of finished iterations, ascending, as metrics.jsonl holds them. None when
    they say nothing of any stage.
    """
    stages = [
        stage for stage in SELECTABLE if any(f"selector/{stage}/switched" in x for x in lines)
    ]
    if not stages:
        return None
    # The making of its font cache is no news for a person.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * len(stages)), layout="constrained")
    panels = figure.subplots(len(stages), len(_PANELS), squeeze=False)
    for stage, row in zip(stages, panels, strict=True):
        for axes, (name, unit, scale) in zip(row, _PANELS, strict=True):
            axes.set_title(f"{stage}: {unit}")
            for kind, style in _STYLES.items():
                # A stage's own seconds are what it measured.
                seconds = (kind, name) == ("measured", "seconds")
                key = f"{stage}/seconds" if seconds else f"selector/{stage}/{kind}_{name}"
                points = [(line["iteration"], line[key] / scale) for line in lines if key in line]
                if points:
                    axes.plot(*zip(*points, strict=True), style, marker=".", label=kind)
                    axes.legend(fontsize="small")
            for line in lines:
                if line.get(f"selector/{stage}/switched"):
                    axes.axvline(line["iteration"], color="grey", linewidth=0.8)
            axes.set_ylim(bottom=0)
    return figure

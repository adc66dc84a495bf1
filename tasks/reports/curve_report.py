"""The learning curve as a page: a picture, and the last iterations as a table.

The picture is inside the page, because a page of Prefect's has no files beside it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

from tasks.reports.chart import MOST_CURVES, Curve, Points, chart
from tasks.reports.lines import Line, mean_return, outcome_names, outcome_shares, total_seconds
from tasks.reports.plan_report import markdown_table

_ROWS_SHOWN = 20


def curve_page(name: str, lines: Sequence[Line], evaluations: Sequence[Line]) -> str:
    """Markdown. lines: metrics of finished iterations, ascending; evaluations: likewise, with how
    many iterations were done before each."""
    returns = [
        Curve("return, training", _points(lines, 1, mean_return)),
        Curve("return, held-out", _points(evaluations, 0, mean_return), style="dotted"),
    ]
    charts = [chart("Mean return of an episode", "return", returns)]
    names = outcome_names(lines)[:MOST_CURVES]
    if names:
        shares = [Curve(each, _shares(lines, each)) for each in names]
        charts.append(
            chart("Outcomes of the training's episodes", "share, %", shares, within=(0, 100))
        )
    parts = [f"## Learning curve of {name}", *map(_image, charts)]
    rows = [_row(line, names) for line in reversed(lines[-_ROWS_SHOWN:])]
    return "\n\n".join([*parts, markdown_table(rows)])


def _row(line: Line, names: Sequence[str]) -> dict[str, str]:
    value, shares = mean_return(line), outcome_shares(line)
    return {
        "iteration": str(line["iteration"]),
        "return": "" if value is None else f"{value:+.3f}",
        **{f"{name} %": f"{100 * shares.get(name, 0.0):.0f}" for name in names[:4]},
        "context": f"{line.get('rollout/context/mean', 0):.0f}",
        "tokens/s": f"{line.get('rollout/tokens_per_second', 0):,.0f}",
        "seconds": f"{total_seconds(line):.1f}",
    }


def _points(lines: Sequence[Line], later: int, number: object) -> Points:
    found = [(float(line["iteration"] + later), number(line)) for line in lines]  # type: ignore[operator]
    return [(x, y) for x, y in found if y is not None and math.isfinite(y)]


def _shares(lines: Sequence[Line], name: str) -> Points:
    return _points(lines, 1, lambda line: 100 * outcome_shares(line).get(name, 0.0))


def _image(svg: str) -> str:
    return f"![learning curve](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"

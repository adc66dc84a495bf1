"""The learning curve of a run as a drawing: return and outcomes, as its page in Prefect has them.

`python -m tools.curve runs/my_run curve.svg`
"""

from __future__ import annotations

import argparse
import base64
import json
import re
from pathlib import Path

from earl_core.run.record import read_lines
from tasks.reports.curve_report import curve_page

_CHART = re.compile(r"data:image/svg\+xml;base64,([\w+/=]+)")
_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def drawing(run: Path) -> str:
    """The charts of `curve_page`, one below the other, as one SVG."""
    evaluations = [
        {"iteration": int(path.parent.name), **json.loads(path.read_text())["metrics"]}
        for path in sorted((run / "iterations").glob("*/evaluation.json"))
    ]
    # A resumed run may have written an iteration twice.
    lines = {line["iteration"]: line for line in read_lines(run / "metrics.jsonl")}
    page = curve_page(run.name, [*lines.values()], evaluations)
    parts, across, down = [], 0, 0
    for chart in _CHART.findall(page):
        text = base64.b64decode(chart).decode()
        size = _SIZE.search(text)
        assert size is not None
        parts.append(text.replace("<svg ", f'<svg y="{down}" ', 1))
        across, down = int(size[1]), down + int(size[2])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}">'
    return head + "".join(parts) + "</svg>\n"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("run", type=Path, help="run directory")
    made.add_argument("target", type=Path, help="the .svg file")
    options = made.parse_args()
    options.target.write_text(drawing(options.run))


if __name__ == "__main__":
    main()

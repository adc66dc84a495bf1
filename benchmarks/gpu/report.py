"""Options and report of the GPU benchmarks, also where the other benchmarks' packages are not."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from earl_core.system.files import write_atomic

Row = dict[str, str | int | float | None]


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="few sizes and repetitions")
    made.add_argument("--smoke", action="store_true", help="a tiny model, also without a GPU")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    return made


def publish(
    name: str,
    title: str,
    rows: list[Row],
    headline: dict[str, float],
    notes: list[str],
    options: argparse.Namespace,
) -> None:
    """Through the benchmarks' shared report where its packages are there, else plainly."""
    with suppress(ImportError):
        from benchmarks.harness import Report
        from benchmarks.harness import publish as shared

        shared(Report(name, title, rows, headline, notes), options)
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(shown(row.get(column)) for column in columns) + " |")
    quoted = [f"**{key}: {shown(value)}**  " for key, value in headline.items()]
    text = "\n".join([f"# {title}", "", *quoted, "", *lines, "", *(f"- {note}" for note in notes)])
    print(text, flush=True)
    if options.markdown:
        write_atomic(options.markdown, (text + "\n").encode(), 0o644)
    if options.json:
        content = {
            "machine": machine(),
            "command": " ".join(sys.argv),
            "rows": rows,
            "headline": headline,
            "notes": notes,
        }
        write_atomic(options.json, (json.dumps(content, indent=1) + "\n").encode(), 0o644)


def machine() -> dict[str, str | int | None]:
    """What a number belongs to."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def shown(value: str | int | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)

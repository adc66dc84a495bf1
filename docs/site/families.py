"""Write the tables of docs/models.md from what the tests of families have recorded.

`python docs/site/families.py` writes them; a test compares the page with `page()`. The record is
`families.json`, written by `tests/families/test_table.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
PAGE = SITE.parent / "models.md"
RECORD = SITE / "families.json"
COLUMNS = (
    *("packing", "replicas", "shards", "context parallel", "tensor parallel", "expert parallel"),
    *("torch engine", "vLLM"),
)
REFUSED = "refused: "
NOT_RUN = "not run"
NO_MIXTURE = "no experts"

_KIND = re.compile(r"\b(?:a|this) [a-z0-9_]+ model(?: of \d+)?")
_BEGIN, _END = "<!-- families: begin -->\n", "<!-- families: end -->"


def record() -> dict[str, Any]:
    """`versions` of what ran, by package, and `families`: by title the outcomes by column."""
    read: dict[str, Any] = json.loads(RECORD.read_text())
    return read


def page() -> str:
    """The whole page."""
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{tables(record())}{_END}{after}"


def tables(found: dict[str, Any]) -> str:
    """A row for all families with the same outcomes; then those that cannot be trained."""
    families = found["families"]
    refused = {name: each["packing"] for name, each in families.items() if _is_refused(each)}
    trained = {name: each for name, each in families.items() if name not in refused}
    notes: dict[str, str] = {}
    rows = _grouped({name: _row(each, notes) for name, each in trained.items()})
    reasons = _grouped({name: (why.removeprefix(REFUSED),) for name, why in refused.items()})
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([
        f"\nWith {versions}:\n",
        _line(["family", *COLUMNS]),
        _line(["---"] * (1 + len(COLUMNS))),
        *rows,
        "",
        *(f"{mark}: {note}.<br>" for note, mark in notes.items()),
        "\nRefused before the first rollout, the families below with these sentences:\n",
        _line(["family", "why"]),
        _line(["---"] * 2),
        *reasons,
        "",
    ])  # fmt: skip


def _is_refused(outcomes: dict[str, str]) -> bool:
    return outcomes.get("packing", "").startswith(REFUSED)


def _row(outcomes: dict[str, str], notes: dict[str, str]) -> tuple[str, ...]:
    """The cells; what follows a colon is a note, of which each new one gets the next mark."""
    cells = []
    for column in COLUMNS:
        word, _, note = outcomes.get(column, NOT_RUN).partition(": ")
        # Families that are refused alike have one note.
        note = _KIND.sub("such a model", note)
        mark = f" {notes.setdefault(note, f'({len(notes) + 1})')}" if note else ""
        cells.append(word + mark)
    return tuple(cells)


def _grouped(rows: dict[str, tuple[str, ...]]) -> list[str]:
    """Lines of the table; families with equal cells are in the first one's."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        names.setdefault(cells, []).append(name)
    return [_line([", ".join(titles), *cells]) for cells, titles in names.items()]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(each.replace('|', '/') for each in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())

"""The record of what the tests of families saw: `docs/site/families.json`."""

from __future__ import annotations

import fcntl
import json
import re
from importlib.metadata import distributions
from typing import Any

from docs.site.families import NOT_RUN, RECORD
from tests.families.registry import FAMILIES

_PACKAGES = {"vLLM": "vllm"}
"""Whose version matters to a column; transformers' does to all."""

_NAMES = {each: (each, f"{each}-cpu") for each in ("transformers", "vllm")}
"""Of a package in the index: vLLM's build for CPUs has another."""


def note(name: str, column: str, outcome: str) -> str:
    """Write a cell's outcome; returns the one that stood there. Outcomes of other versions of
    transformers, or of vLLM, are dropped: nobody knows them for this one."""
    with RECORD.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = json.load(file)
        _renew(found, "transformers", None)
        if column in _PACKAGES:
            _renew(found, _PACKAGES[column], column)
        known = found["families"]
        cells = known.setdefault(FAMILIES[name].title, {})
        before: str = cells.get(column, NOT_RUN)
        cells[column] = outcome
        titles = [family.title for family in FAMILIES.values()]
        found["families"] = {title: known[title] for title in titles if title in known}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return before


def _renew(found: dict[str, Any], package: str, column: str | None) -> None:
    installed = next(each.version for name in _NAMES[package] for each in distributions(name=name))
    if found["versions"].get(package) == installed:
        return
    found["versions"][package] = installed
    for cells in found["families"].values():
        for each in [column] if column else list(cells):
            cells.pop(each, None)


_BEFORE = re.compile(
    r"^(The model at )?\S+ (cannot be trained on packed samples|lets packed samples see each other"
    r"|cannot be split over \d ([a-z]+-)?parallel ranks): |\w+Attention was called [^,]*, because ",
)
_AFTER = re.compile(r"[:.] (choose|set|use|raise|lower|update) .*", re.IGNORECASE | re.DOTALL)


def shortened(sentence: str) -> str:
    """What the product found, without whom it tells and what to do instead."""
    return _BEFORE.sub("", _AFTER.sub("", sentence)).rstrip(".")

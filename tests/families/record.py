"""The record of what the tests of families saw: `docs/site/families.json`."""

from __future__ import annotations

import fcntl
import json
import re
from importlib.metadata import version
from typing import Any

from docs.site.families import NOT_RUN, RECORD, record
from tests.families.registry import FAMILIES

_PACKAGES = {"vLLM": "vllm"}
"""Whose version matters to a column; transformers' does to all."""


def note(name: str, column: str, outcome: str) -> str:
    """Write a cell's outcome; returns the one that stood there. Outcomes of other versions of
    transformers, or of vLLM, are dropped: nobody knows them for this one."""
    with RECORD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = record() if RECORD.exists() else {"versions": {}, "families": {}}
        _renew(found, "transformers", None)
        if column in _PACKAGES:
            _renew(found, _PACKAGES[column], column)
        known = found["families"]
        cells = known.setdefault(FAMILIES[name].title, {})
        before: str = cells.get(column, NOT_RUN)
        cells[column] = outcome
        titles = [family.title for family in FAMILIES.values()]
        found["families"] = {title: known[title] for title in titles if title in known}
        RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return before


def _renew(found: dict[str, Any], package: str, column: str | None) -> None:
    if found["versions"].get(package) == version(package):
        return
    found["versions"][package] = version(package)
    for cells in found["families"].values():
        for each in [column] if column else list(cells):
            cells.pop(each, None)


def shortened(sentence: str) -> str:
    """What the product said, without what to do instead and without this model's path and class."""
    problem = re.sub(r": (set|use|choose|train|take) .*", "", sentence, flags=re.DOTALL)
    problem = re.sub(r"\S*/\S+/model\b", "the model", problem)
    return re.sub(r"\b\w+For(CausalLM|ConditionalGeneration)\b", "it", problem).rstrip(".")

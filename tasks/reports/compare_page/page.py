"""The page itself: runs side by side in the template."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.comparison import EqualPrompt
from earl_core.secrets import shareable_values
from earl_core.system.plural import plural
from tasks.reports.compare_page.charts import compared_sections
from tasks.reports.compare_page.compared import Compared, StageSeconds, facts
from tasks.reports.web_page import encoded, filled, write

_MOST_CHARACTERS = 8_000_000
"""Of all episodes together; prompts that no room is left for are left out."""


class Written(NamedTuple):
    """A page: its file, its bytes, how many prompts it shows."""

    path: Path
    bytes: int
    prompts: int


def write_page(found: Compared, output: Path) -> Written:
    """Write the page, whole or not at all. output: a device or a pipe is never replaced by a file.
    Raises `OSError`."""
    prompts, left_out = _fitting(found.prompts)
    notes = [*found.damaged]
    if not found.prompts:
        notes.append("The runs have kept no episodes of equal prompts.")
    if left_out:
        notes.append(
            f"{plural(left_out, 'prompt')} more are left out: the page has a bounded size."
        )
    told = {
        "labels": found.labels,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "facts": [facts(*each) for each in zip(found.labels, found.records, strict=True)],
        "settings": [[name, *values] for name, values in found.settings.items()],
        "seconds": [[stage, *map(seconds_text, own)] for stage, own in found.seconds.items()],
        "notes": notes,
        "commands": _commands(found),
    }
    # Calls of tools are not marked: runs may have other forms of them.
    data = {**shareable_values(told), "sections": compared_sections(found), "tools": []}
    page = filled("compare.html", ("compare.js",), data, {"prompts": encoded(prompts)})
    return Written(output, write(output, page), len(prompts))


def seconds_text(value: StageSeconds | None) -> str:
    """Write seconds with their interval, such as `1.54 ± 0.20`."""
    if value is None:
        return ""
    error = "" if value.error is None else f" ± {value.error:.2f}"
    return f"{value.mean:.2f}{error}"


def _commands(found: Compared) -> list[tuple[str, str]]:
    paths = [shlex.quote(str(records.path)) for records in found.records]
    first = f"earl bisect {paths[0]} {paths[1]}"
    return [
        ("Make this page again", f"earl compare {' '.join(paths)} --html compare.html"),
        ("Find the first stage in which the first two differ", first),
    ]


def _fitting(prompts: list[EqualPrompt]) -> tuple[list[dict[str, Any]], int]:
    """The prompts that the page has room for, as plain data, and how many it has none for."""
    shown: list[dict[str, Any]] = []
    left = _MOST_CHARACTERS
    for prompt in prompts:
        long = sum(len(text) for own in prompt.episodes for each in own for text in each.texts)
        if long <= left:
            left -= long
            shown.append(_plain(prompt))
    return shown, len(prompts) - len(shown)


def _plain(prompt: EqualPrompt) -> dict[str, Any]:
    return {
        "environment": prompt.environment,
        "prompt": prompt.prompt,
        "returns": [None if each is None else round(each, 4) for each in prompt.returns],
        "spread": round(prompt.spread, 4),
        "episodes": [[each._asdict() for each in own] for own in prompt.episodes],
    }

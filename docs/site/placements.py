"""Write the table of docs/placements.md from the run settings on that page.

`python docs/site/placements.py` writes it; a test compares the page with `page()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from rich.filesize import decimal

from earl_core.config import RunConfig, parse_config
from earl_core.control.stage_moves import Move
from earl_core.deployment.stages import ROWS
from flows.cli.plan_file import Explanation, explanation

PAGE = Path(__file__).resolve().parents[1] / "placements.md"
MODEL = "qwen3-8b"

_BEGIN, _END = "<!-- placements: begin -->\n", "<!-- placements: end -->"
_BLOCK = re.compile(r"^```yaml\n# on (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN_FILE = re.compile(r"^```yaml\n# the run file\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)
OWN = "Your own"
"""The heading of the block that names a placement that no package has."""


def blocks(text: str) -> Iterator[tuple[str, str, RunConfig]]:
    """Heading, hardware and settings of each block of the page, beside those of its run file."""
    found = _RUN_FILE.search(text)
    assert found is not None
    for block in _BLOCK.finditer(text):
        headings = _HEADING.findall(text[: block.start()])
        told: dict[str, Any] = yaml.safe_load(found[1])
        for section, settings in yaml.safe_load(block[2]).items():
            own = told.get(section, {}) if section != "environment" else {}
            told[section] = {**own, **settings}
        yield headings[-1], block[1], parse_config(told)


def page() -> str:
    """The whole page."""
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{table(text)}{_END}{after}"


def table(text: str) -> str:
    """A row for each block."""
    names = ["", "hosts x devices", "engines", "ranks of the update"]
    names += [
        "rollout to rewards and advantages",
        "all columns to the update",
        "weights to engines",
    ]
    lines = [names, ["---"] * len(names)]
    for heading, hardware, config in blocks(text):
        if heading == OWN:
            continue
        told = explanation(config, hardware, MODEL, None)
        lines.append([_link(heading), hardware, *_seats(told), *_borders(told)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _link(heading: str) -> str:
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](#{anchor})"


def _seats(told: Explanation) -> list[str]:
    """Where engines and ranks of the update are, a clause for each host."""
    found = []
    for what, stages in (("engine", ROWS), ("rank", ("update",))):
        clauses = []
        seats = [seat for seat in told.seats if seat.stage in stages and seat.devices]
        for host, own in groupby(seats, key=lambda seat: seat.host):
            both = [(seat.who, seat.devices) for seat in own]
            who, devices = (_span(" ".join(words)) for words in zip(*both, strict=True))
            clauses.append(f"{host}: {what}s {who} on GPUs {devices}")
        found.append("; ".join(clauses))
    return found


def _span(text: str) -> str:
    numbers = [int(each) for each in re.findall(r"\d+", text)]
    return f"{min(numbers)}-{max(numbers)}"


def _borders(told: Explanation) -> list[str]:
    """Bytes mapped, and bytes from other hosts where there are any."""
    rewards = [m for m in told.moves if m.of in ROWS and m.to in ("reward", "advantage")]
    update = [m for m in told.moves if m.to == "update"]
    weights = [m for m in told.moves if m.of == "publish"]
    return [_size(each) for each in (rewards, update, weights)]


def _size(moves: list[Move]) -> str:
    here, received = sum(m.here for m in moves), sum(m.received for m in moves)
    text = f"{decimal(here)} mapped"
    ways = ", ".join(dict.fromkeys(move.ways[-1] for move in moves if move.received))
    return f"{text}, {decimal(received)} by {ways}" if received else text


if __name__ == "__main__":
    PAGE.write_text(page())

"""Findings on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from earl_core.system.finding import Finding, Level
from earl_core.system.plural import plural

_MARKS: dict[Level, tuple[str, str]] = {
    "good": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "blocks": ("✗", "bold red"),
}


def summary(levels: Counter[Level], verb: str, what: str) -> str:
    """Count the findings that block (`verb` `what`), and those that deserve a look."""
    blocks, looks = levels["blocks"], levels["warning"]
    return (
        f"{plural(blocks, 'finding')} {verb}{'s' if blocks == 1 else ''} {what}, {looks} "
        f"deserve{'s' if looks == 1 else ''} a look."
    )


def show_findings(console: Console, topic: str, findings: Iterable[Finding]) -> Counter[Level]:
    """Print a topic's findings as they come; returns how many there are of each level."""
    levels: Counter[Level] = Counter()
    console.print(f"\n{topic}", style="bold")
    for finding in findings:
        levels[finding.level] += 1
        mark, style = _MARKS[finding.level]
        console.print(Text(f"  {mark} ", style).append(finding.text, style=""), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"    → {finding.advice}"), soft_wrap=True)
    return levels

"""`earl doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from earl_core.config import ConfigError, RunConfig, load_config
from flows.cli.checks.configuration import check_configuration
from flows.cli.checks.finding import Finding
from flows.cli.checks.machine import check_machine
from flows.cli.checks.packages import check_packages
from flows.cli.checks.services import check_services
from flows.cli.checks.shared_memory import check_shared_memory
from flows.cli.tables import make_console

_MARKS = {"good": ("✓", "green"), "note": ("·", "cyan"), "warning": ("!", "yellow")}
_BLOCK = ("✗", "bold red")


def doctor(config: str | None) -> int:
    """Print every finding; 1 if something blocks, else 0."""
    console = make_console()
    findings = []
    topic = ""
    for finding in examine(config):
        findings.append(finding)
        if finding.topic != topic:
            topic = finding.topic
            console.print(f"\n{topic}", style="bold")
        mark, style = _MARKS.get(finding.level, _BLOCK)
        console.print(Text(f"  {mark} ", style).append(finding.text, style=""), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"    → {finding.advice}"), soft_wrap=True)
    blocking = sum(finding.level == "blocks" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(f"\n{blocking} findings block a run, {warnings} deserve a look.", style="bold")
    return 1 if blocking else 0


def examine(config: str | None) -> Iterator[Finding]:
    """All findings, topic by topic; with a run file, what it needs as well."""
    settings: RunConfig | None = None
    problem = ""
    if config is not None:
        try:
            settings = load_config(config)
        except ConfigError as error:
            problem = str(error)
    yield from check_packages(settings)
    yield from check_machine(Path(settings.runs_directory if settings else "runs"))
    yield from check_shared_memory(settings)
    yield from check_services(os.environ)
    if problem:
        yield Finding("blocks", "Run file", problem, "correct the file, or the name")
    elif settings is not None:
        yield from check_configuration(settings)

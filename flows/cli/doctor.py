"""`earl doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.text import Text

from earl_core.config import ConfigError, RunConfig, load_config
from flows.cli.checks.configuration import check_configuration
from flows.cli.checks.finding import Finding, Level, refused
from flows.cli.checks.hosts import check_hosts
from flows.cli.checks.machine import check_machine
from flows.cli.checks.packages import check_packages
from flows.cli.checks.services import check_services
from flows.cli.checks.shared_memory import check_shared_memory
from flows.cli.tables import make_console

_MARKS: dict[Level, tuple[str, str]] = {
    "good": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "blocks": ("✗", "bold red"),
}


def doctor(config: str | None) -> int:
    """Print every finding; 1 if something blocks, else 0."""
    console = make_console()
    levels: Counter[Level] = Counter()
    for topic, findings in examine(config):
        console.print(f"\n{topic}", style="bold")
        for finding in findings:
            levels[finding.level] += 1
            mark, style = _MARKS[finding.level]
            console.print(Text(f"  {mark} ", style).append(finding.text, style=""), soft_wrap=True)
            if finding.advice:
                console.print(Text(f"    → {finding.advice}"), soft_wrap=True)
    console.print(
        f"\n{levels['blocks']} findings block a run, {levels['warning']} deserve a look.",
        style="bold",
    )
    return 1 if levels["blocks"] else 0


def examine(config: str | None) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Topics and their findings; with a run file, what it needs as well."""
    settings: RunConfig | None = None
    of_file: Iterable[Finding] = ()
    if config is not None:
        try:
            settings = load_config(config)
            of_file = check_configuration(settings)
        except ConfigError as error:
            of_file = [refused(error)]
    yield "Versions", check_packages(settings)
    yield "Machine", check_machine(Path(settings.runs_directory if settings else "runs"))
    yield "Shared memory", check_shared_memory(settings)
    yield "Services", check_services(os.environ)
    if settings is not None and settings.cluster.backend != "local":
        yield "Hosts", check_hosts(settings)
    if config is not None:
        yield "Run file", of_file

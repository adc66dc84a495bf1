"""`earl doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from earl_core.config import RunConfig, load_config
from earl_core.control.ancestor import beginning
from earl_core.system.errors import EarlError
from earl_core.system.finding import Finding, Level, refused
from flows.cli.checks.configuration import check_configuration, precision
from flows.cli.checks.machine import check_hosts, check_machine
from flows.cli.checks.packages import check_packages
from flows.cli.checks.services import check_services
from flows.cli.checks.shared_memory import check_shared_memory
from flows.cli.findings import show_findings, summary
from flows.cli.tables import make_console


def doctor(config: str | None) -> int:
    """Print every finding; 1 if something blocks, else 0."""
    console = make_console()
    levels: Counter[Level] = Counter()
    for topic, findings in examine(config):
        levels += show_findings(console, topic, findings)
    console.print(f"\n{summary(levels, 'block', 'a run')}", style="bold")
    return 1 if levels["blocks"] else 0


def examine(config: str | None) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Topics and their findings; with a run file, what it needs as well."""
    settings: RunConfig | None = None
    begins: RunConfig | None = None
    of_file: Iterable[Finding] = ()
    if config is not None:
        try:
            settings = load_config(config)
            run = Path(settings.runs_directory) / settings.name
            settings, slow = precision(settings, run)
            begins = settings
            with suppress(EarlError):  # the run file's part says it
                begins = beginning(settings)
            of_file = chain(check_configuration(settings), slow)
        except EarlError as error:
            of_file = [refused(error)]
    yield "Versions", check_packages(settings)
    runs = Path(settings.runs_directory if settings else "runs")
    yield "Machine", check_machine(runs)
    yield "Shared memory", check_shared_memory(begins)
    yield "Services", check_services(os.environ, runs)
    if settings is not None and settings.cluster.backend != "local":
        yield "Hosts", check_hosts(settings)
    if config is not None:
        yield "Run file", of_file

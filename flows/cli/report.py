"""`earl report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

from earl_core.system.errors import ConfigError
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from tasks.reports.run_page import write_page


def report(run: str, runs_directory: str, output: Path | None, episodes: int) -> None:
    """Write the page of a run and say where it lies. output: None for RUN/report.html. Raises
    `ConfigError` where there is no such run, or the file cannot be written."""
    path = find_run(run, runs_directory)
    output = path / "report.html" if output is None else output
    try:
        page = write_page(path, iterations_of(path), evaluations_of(path), output, episodes)
    except OSError as error:
        raise ConfigError(
            f"the page {output} cannot be written ({error.strerror}): choose another with --output"
        ) from None
    listed = f"{page.episodes:,} episode{'' if page.episodes == 1 else 's'}"
    print(f"{page.path}: {page.bytes / 1e6:.1f} MB, {listed}; open it in a browser")
    for text in page.told:
        print(text)

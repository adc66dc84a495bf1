"""`earl server`: Prefect's web interface for the runs of a directory, behind a password.

Runs are found by name and read without locking them.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from earl_core.dispatch import ManifestError, read_manifest
from earl_core.run.record import RunDamaged, read_lines, read_record
from earl_core.system.errors import ConfigError
from flows import server
from flows.cli.interrupt import Interrupted, leave, run_interruptible
from flows.reaper import keep_reconciled
from flows.server_access import STANDING, is_mine, read_access
from tasks.reports.lines import Line


def serve(runs_directory: str, port: int) -> None:
    """Serve until a signal; the file with address and password goes with the server."""
    home = server.configure(runs_directory)
    known = read_access(home / STANDING)
    if known is not None and is_mine(known.url):
        raise ConfigError(
            f"a server for {home} runs already: its address and password are in {home / STANDING}"
        )
    try:
        started = server.start_own(home, port, pages=True)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be listened on ({error.strerror}): choose another with --port"
        ) from None
    ended = threading.Event()

    def work() -> None:
        started.ready()
        _say(started, home)
        keep_reconciled(started.access, runs_directory)
        while not ended.wait(1.0):
            if started.ended:
                raise server.ServerUnavailable(
                    f"the Prefect server has ended: look at its log {home}/embedded-server.log"
                )

    try:
        run_interruptible(work, ended.set, lambda: None)
    except Interrupted as interrupted:
        started.stop()
        leave(interrupted.exit_code)
    finally:
        started.stop()


def _say(started: server.Server, home: Path) -> None:
    note = started.tell(home / STANDING)
    print(f"Prefect's pages: {started.url.removesuffix('/api')}")
    print(f"The password they ask for is in {note} (PREFECT_API_AUTH_STRING).")
    print(f"`earl` finds this server by itself; for `prefect` commands: source {note}", flush=True)


def find_run(run: str, runs_directory: str) -> Path:
    """The directory of a run given by name or by path; raises `ConfigError`."""
    for path in (Path(run), Path(runs_directory) / run):
        if (path / "config.yaml").is_file():
            return path
    known = sorted(path.parent.name for path in Path(runs_directory).glob("*/config.yaml"))
    listed = f"it holds {', '.join(known)}" if known else "it holds no runs"
    raise ConfigError(
        f"there is no run {run!r}: give a run directory, or the name of one in "
        f"{runs_directory}/ ({listed})"
    )


def iterations_of(path: Path) -> list[Line]:
    """Every finished iteration of a run, ascending."""
    latest = {line["iteration"]: line for line in read_lines(path / "metrics.jsonl")}
    return [latest[number] for number in sorted(latest)]


def evaluations_of(path: Path) -> list[Line]:
    """Every evaluation of a run, ascending by policy version; damaged ones are left out."""
    lines: list[Line] = []
    for sealed in sorted((path / "iterations").glob("*/evaluation.json")):
        with suppress(ManifestError):
            manifest = read_manifest(sealed)
            lines.append({"iteration": manifest.iteration, **manifest.metrics})
    return lines


def tracking_uri(path: Path) -> str | None:
    """Where the run was tracked; None when it was not."""
    try:
        record = read_record(path)
    except (OSError, RunDamaged):
        return None
    uri = (record.get("tracking") or {}).get("uri")
    return uri if isinstance(uri, str) else None

"""`earl server`: Prefect's web interface for the runs of a directory, behind a password."""

from __future__ import annotations

import threading
from pathlib import Path

from earl_core.system.errors import ConfigError
from flows import server
from flows.cli.interrupt import Interrupted, leave, run_interruptible
from flows.reaper import keep_reconciled
from flows.server_access import STANDING, is_mine, read_access


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

"""Before every command: flow runs whose process is gone get their state, where a server runs."""

from __future__ import annotations

import os
from pathlib import Path

from flows.reaper import try_to_reconcile
from flows.server import ServerUnavailable, running_server

_SECONDS = 2.0


def settle(runs_directory: Path) -> None:
    """Look at the flow runs of a runs directory, quickly and without a word.

    Where no server runs there is nobody to tell; the next command that starts one does.
    """
    home = Path(os.environ.get("PREFECT_HOME") or runs_directory / "prefect")
    if not home.is_dir():
        return
    try:
        access = running_server(home, _SECONDS)
    except ServerUnavailable:
        return
    if access is not None:
        try_to_reconcile(access, runs_directory, _SECONDS)

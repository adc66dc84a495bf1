"""Makes the states of flow runs at a Prefect server equal to what this machine knows of them.

A killed controller tells its server nothing, and a server that died is told nothing: such a flow
run would stay Running for ever and hold its concurrency slot. Every process of ours with a flow
looks at the notes and the tags of flow runs at its start and every few seconds, and so does each
`earl` command that finds a server. No module of Prefect is needed, so that it takes no time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import urllib.error
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from flows import flow_ledger
from flows.flow_ledger import Note
from flows.server import ServerUnavailable, running_server
from flows.server_access import Access

logger = logging.getLogger(__name__)

EVERY_SECONDS = 20.0
_QUICK_SECONDS = 2.0

_FLOWS = ["train", "iteration", "evaluate", "profile"]
_OPEN = ["PENDING", "RUNNING", "CANCELLING"]
_WAITING = {"SCHEDULED", "PENDING"}
_FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
_UNOWNED_SECONDS = 30.0
"""From Running to its first line, where it is noted, a flow takes milliseconds; so does its end."""

_FORGOTTEN_SECONDS = 7 * 86400.0

_MESSAGES = {
    "COMPLETED": "Its run directory says so.",
    "FAILED": "It failed; found later, because the server was not told.",
    "CRASHED": "Its process is gone; found by another.",
    "CANCELLED": "It was stopped; found later, because the server was not told.",
    "RUNNING": "Its process lives.",
}


def reconcile(access: Access, runs_directory: str | Path, timeout: float = 10.0) -> list[str]:
    """Correct the states of this host's flow runs; the ids of those that were wrong. Raises
    `OSError` or `ValueError` when the server cannot be asked."""
    notes = [note for note in flow_ledger.read_all(runs_directory) if note.here]
    corrected = [note.flow_run for note in notes if _settle(access, runs_directory, note, timeout)]
    known = {note.flow_run for note in notes}
    chosen = {
        "flow_runs": {"tags": {"all_": [flow_ledger.TAG]}, "state": {"type": {"any_": _OPEN}}},
        "flows": {"name": {"any_": _FLOWS}},
        "limit": 200,
    }
    for found in access.ask("flow_runs/filter", chosen, timeout=timeout):
        identity, tags = str(found["id"]), flow_ledger.marks_of(found)
        if identity in known or flow_ledger.of_other_runs(tags, runs_directory):
            continue
        note = flow_ledger.note_from_tags(identity, tags)
        dead = note is None or (note.here and not note.alive)
        if dead and (note is None or _retried(found)):
            dead = found["state_type"] == "RUNNING" and _age(found) > _UNOWNED_SECONDS
        # One that began meanwhile has a note by now.
        if dead and flow_ledger.read(runs_directory, identity) is None:
            _set(access, identity, _killed(str(found["state_type"])), timeout)
            corrected.append(identity)
    return corrected


def _settle(access: Access, runs_directory: str | Path, note: Note, timeout: float) -> bool:
    """Give the flow run of a note its state; whether it had another. A settled note is removed."""
    age = flow_ledger.age(runs_directory, note)
    if note.alive and note.outcome is not None and age < _UNOWNED_SECONDS:
        return False  # Prefect is about to tell the server itself
    try:
        state = str(access.ask(f"flow_runs/{note.flow_run}", timeout=timeout)["state_type"])
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        # It is at another server, or that one's database is gone.
        if not note.alive and age > _FORGOTTEN_SECONDS:
            flow_ledger.remove(runs_directory, note.flow_run)
        return False
    if flow_ledger.read(runs_directory, note.flow_run) != note:
        return False  # it has just ended
    wanted = note.outcome or ("RUNNING" if note.alive else _verdict(note, state))
    if state in _WAITING and wanted != "RUNNING":
        # What is noted had run: it has ended, and is about to be tried again.
        flow_ledger.remove(runs_directory, note.flow_run)
        return False
    if wanted == "RUNNING" or note.outcome is None:
        wrong = (state in _FINAL) == (wanted == "RUNNING")
    else:
        wrong = state != wanted
    if wrong:
        _set(access, note.flow_run, wanted, timeout)
    if wanted != "RUNNING":
        flow_ledger.remove(runs_directory, note.flow_run)
    return wrong


def _killed(state: str) -> str:
    """The final state of a flow in this state whose process was killed; its worker kills, too."""
    return "CANCELLED" if state in ("CANCELLING", "CANCELLED") else "CRASHED"


def _verdict(note: Note, state: str) -> str:
    """The final state of a flow whose process was killed: its run directory may say it was done."""
    if not note.run:
        return _killed(state)
    # Every command imports this module, and this takes longer than the rest together.
    from earl_core.run.checkpoints import stable_checkpoints
    from earl_core.run.record import is_finished

    if note.iteration is None:
        done = is_finished(Path(note.run))
    else:
        done = note.iteration <= max(stable_checkpoints(Path(note.run)), default=-1)
    return "COMPLETED" if done else _killed(state)


def _retried(flow_run: dict[str, Any]) -> bool:
    """Tell whether the process that a flow run's labels name is an earlier attempt's."""
    return int(flow_run["run_count"]) > (0 if flow_run["state_type"] in _WAITING else 1)


def _age(flow_run: dict[str, Any]) -> float:
    since = datetime.fromisoformat(flow_run["state"]["timestamp"].replace("Z", "+00:00"))
    return time.time() - since.timestamp()


def _set(access: Access, flow_run: str, wanted: str, timeout: float) -> None:
    state = {"type": wanted, "name": wanted.capitalize(), "message": _MESSAGES[wanted]}
    path = f"flow_runs/{flow_run}/set_state"
    access.ask(path, {"state": state, "force": True}, timeout=timeout)


def try_to_reconcile(access: Access, runs_directory: str | Path, timeout: float = 10.0) -> None:
    """Correct states as `reconcile` does; a server that cannot be asked is asked the next time."""
    try:
        for flow_run in reconcile(access, runs_directory, timeout):
            logger.info("corrected the state of flow run %s", flow_run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("the states of flow runs were not looked at: %s", error)


def settle(runs_directory: Path) -> None:
    """Look at the flow runs of a runs directory, quickly and without a word; before any command.
    Where no server runs there is nobody to tell; the next command that starts one does."""
    home = Path(os.environ.get("PREFECT_HOME") or runs_directory / "prefect")
    if not home.is_dir():
        return
    with suppress(ServerUnavailable):
        access = running_server(home, runs_directory, _QUICK_SECONDS)
        if access is not None:
            try_to_reconcile(access, runs_directory, _QUICK_SECONDS)


_watched: set[tuple[Access, str]] = set()
_lock = threading.Lock()


def keep_reconciled(access: Access, runs_directory: str | Path) -> None:
    """Reconcile now, and every few seconds for as long as this process lives."""
    key = access, str(Path(runs_directory).resolve())
    with _lock:
        if key in _watched:
            return
        _watched.add(key)
    try_to_reconcile(*key)

    def again() -> None:
        while True:
            time.sleep(EVERY_SECONDS)
            try_to_reconcile(*key)

    threading.Thread(target=again, name="reaper", daemon=True).start()

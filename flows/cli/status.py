"""`earl status`: services, runs and shared memory of a runs directory. Prefect is not imported."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from earl_core.config.services import DispatchConfig
from earl_core.deployment.stages import taking_part
from earl_core.run.record import config_of_run
from earl_core.run.run_stores import list_stores
from earl_core.system.errors import EarlError
from earl_core.system.processes import start_time
from earl_core.system.service import living_service, read_services
from flows.cli.found_runs import branch_of, iterations_of
from flows.cli.runs import state_of
from flows.cli.tables import duration, make_console, rows_table
from flows.server import ServerUnavailable, access_of, running_server
from tasks.tracking.mlflow_client import without_login

_SERVICES = ("prefect", "mlflow", "worker")
_PATIENCE = 2.0


def show_status(runs_directory: str, as_json: bool) -> None:
    """Print it as tables, or as JSON."""
    runs = Path(runs_directory)
    found = {
        "services": services(runs),
        "runs": run_states(runs),
        "shared_memory": shared_memory(runs),
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = make_console()
    console.print(rows_table([_service_row(row) for row in found["services"]]))
    console.print()
    if found["runs"]:
        console.print(rows_table([_run_row(row) for row in found["runs"]]))
    else:
        console.print(f"No runs in {runs}/.")
    console.print()
    rows = found["shared_memory"]
    if rows:
        table = [{**row, "size": decimal(row["bytes"]), "bytes": ""} for row in rows]
        console.print(rows_table(table))
    else:
        console.print("No shared memory is used.")


def services(runs: Path) -> list[dict[str, Any]]:
    """List the services that `earl up` started, and servers that commands would use in their place.

    state: running, not answering, ended (it should run, and does not), other (somebody else's) or
    none. since: Unix time in seconds.
    """
    known = read_services(runs)
    rows = []
    for name in _SERVICES:
        row: dict[str, Any] = {"service": name, "state": "none", "address": "", "since": None}
        service = known.get(name)
        if service is not None and service.process:
            row |= {"state": "running" if service.alive else "ended", "address": service.url}
            row["since"] = service.since
            if name == "prefect" and service.alive and not access_of(service).healthy(_PATIENCE):
                row["state"] = "not answering"
        elif other := _other(name, runs):
            row |= {"state": "other", "address": other}
        rows.append(row)
    return rows


def _other(name: str, runs: Path) -> str | None:
    if name == "mlflow":
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            return without_login(uri)
        found = living_service(runs, name)
        return found.url if found else None
    if name == "prefect":
        home = Path(os.environ.get("PREFECT_HOME") or runs / "prefect")
        with suppress(ServerUnavailable):
            access = running_server(home, runs, _PATIENCE)
            return access.site if access else None
    return None


def run_states(runs: Path) -> list[dict[str, Any]]:
    """Every run of the directory: iterations done and in all, the stage it is at, who works on it.
    state: as of `earl runs`, or unreadable."""
    rows = []
    for path in sorted(config.parent for config in runs.glob("*/config.yaml")):
        row: dict[str, Any] = {"run": path.name, "state": "unreadable"}
        with suppress(EarlError, OSError, ValueError, KeyError):
            row |= _run_state(path)
        rows.append(row)
    return rows


def _run_state(path: Path) -> dict[str, Any]:
    config = config_of_run(path)
    lines = iterations_of(path)
    done = lines[-1]["iteration"] + 1 if lines else 0
    state = state_of(path)
    stages = [stage.name for stage in taking_part(config, config.imitates(done))]
    folder = path / "iterations" / f"{done:06d}"
    ahead = [name for name in stages if not (folder / f"{name}.json").is_file()]
    return {
        "state": state,
        "iterations": done,
        "of": config.iterations,
        "branch": branch_of(path),
        # Sealed stages are done; the first that is not is worked on, or resumed with.
        "stage": None if state == "finished" else (ahead[0] if ahead else stages[-1]),
        "process": _owner(path) if state == "training" else None,
        "seconds_since": round(time.time() - lines[-1]["time"], 1) if lines else None,
    }


def _owner(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        pid = int((path / "lock").read_text())
        return pid if start_time(pid) is not None else None
    return None


def shared_memory(runs: Path) -> list[dict[str, Any]]:
    """Bytes of every run's folder in shared memory, where the runs keep theirs."""
    places = {Path(DispatchConfig().directory)}
    for config in runs.glob("*/config.yaml"):
        with suppress(EarlError, OSError, ValueError):
            places.add(Path(config_of_run(config.parent).dispatch.directory))
    return [
        {"run": str(store.run_directory or "unknown"), "bytes": store.bytes,
         "folder": str(store.directory)}
        for place in sorted(places)
        for store in list_stores(place)
    ]  # fmt: skip


def _service_row(row: dict[str, Any]) -> dict[str, str]:
    since = row["since"]
    return {
        "service": row["service"],
        "state": row["state"],
        "address": row["address"].removesuffix("/api"),
        "for": duration(time.time() - since) if since and row["state"] != "ended" else "",
    }


def _run_row(row: dict[str, Any]) -> dict[str, str]:
    ago = row.get("seconds_since")
    return {
        "run": row["run"],
        "state": row["state"],
        "iterations": f"{row['iterations']} of {row['of']}" if "of" in row else "",
        "branch": str(row.get("branch") or ""),
        "stage": row.get("stage") or "",
        "process": str(row.get("process") or ""),
        "last iteration": f"{duration(ago)} ago" if ago is not None else "",
    }

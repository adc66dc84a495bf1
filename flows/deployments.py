"""The deployments that the Prefect server offers: one for each flow that people start.

`earl up` deploys them. `prefect.yaml` says the same to `prefect deploy`, for a server and a worker
of somebody's own; a test keeps the two equal. They name flows by module, so that an installed
package suffices.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from flows.flow_ledger import TAG
from flows.forms import FIRST_RUN, renew_runs
from flows.server_access import Access

POOL = "earl"
"""The process work pool that the worker serves."""

_QUEUE = {"limit": 1, "collision_strategy": "ENQUEUE"}


class Deployment(NamedTuple):
    """A flow, by its name and that of its module, and the values that its form begins with."""

    name: str
    description: str
    parameters: dict[str, Any]
    alone: bool
    """True where a second flow run waits for the first."""

    @property
    def entrypoint(self) -> str:
        """The flow's module and name."""
        return f"flows.{self.name}:{self.name}"

    def project_entry(self) -> dict[str, Any]:
        """Entry of the deployment in `prefect.yaml`."""
        return {
            "name": self.name,
            "entrypoint": self.entrypoint,
            "description": self.description,
            "tags": [TAG],
            **({"concurrency_limit": dict(_QUEUE)} if self.alone else {}),
            "parameters": self.parameters,
            "work_pool": {"name": POOL},
        }


def deployments(runs_directory: str = "runs") -> Iterator[Deployment]:
    """All of them, for runs in this directory, which is told by its whole path unless it is the one
    of runs by default."""
    if runs_directory != "runs":
        runs_directory = str(Path(runs_directory).resolve())
    elsewhere = [] if runs_directory == "runs" else [f"runs_directory={json.dumps(runs_directory)}"]
    overrides = {"overrides": elsewhere} if elsewhere else {}
    run = {"run": f"{runs_directory}/{FIRST_RUN}"}
    yield Deployment(
        "train",
        "Train until all iterations are done; a run that exists is continued.",
        {"config": FIRST_RUN, **overrides},
        # Runs share this host's cores, memory and shared memory.
        alone=True,
    )
    yield Deployment(
        "iteration",
        "Do the next iteration of a run that exists, and end with a checkpoint.",
        run,
        alone=True,
    )
    yield Deployment(
        "evaluate", "Play held-out episodes with a checkpoint of a run.", run, alone=False
    )
    yield Deployment(
        "profile",
        "Measure stage deployments for the selector; a profile that was stopped goes on.",
        {"config": FIRST_RUN, "minutes": 20, **overrides},
        # Beside a training its measurements would be of a busy machine.
        alone=True,
    )


def deploy(access: Access, runs_directory: str, directory: Path | None = None) -> None:
    """Make the work pool and all deployments, or renew those that are there.

    Parameters, schedules and limits that somebody changed at the server stay. directory: where flow
    runs work, to which paths in a form are relative; None leaves it as it is, for a new deployment
    the working directory. Raises `OSError` or `ValueError` when the server cannot be asked.
    """
    _ensure(access, f"work_pools/{POOL}", "work_pools/", {"name": POOL, "type": "process"})
    # Not the worker's setting: a process that begins in the project would find the project's
    # modules before ours.
    place = {"directory": str((directory or Path.cwd()).resolve())}
    steps = {"pull_steps": [{"prefect.deployments.steps.set_working_directory": place}]}
    for deployment in deployments(runs_directory):
        renewed = {
            "description": deployment.description,
            "entrypoint": deployment.entrypoint,
            "parameter_openapi_schema": _schema(deployment),
            "tags": [TAG],
            "work_pool_name": POOL,
            **(steps if directory is not None else {}),
        }
        flow = access.ask("flows/", {"name": deployment.name})["id"]
        new = {
            **renewed,
            **steps,
            "name": deployment.name,
            "flow_id": flow,
            "parameters": deployment.parameters,
            "enforce_parameter_schema": True,
        }
        if deployment.alone:
            new["concurrency_limit"] = _QUEUE["limit"]
            new["concurrency_options"] = {"collision_strategy": _QUEUE["collision_strategy"]}
        known = _ensure(
            access, f"deployments/name/{deployment.name}/{deployment.name}", "deployments/", new
        )
        if known is not None:
            access.ask(f"deployments/{known['id']}", renewed, method="PATCH")
    renew_runs(access, runs_directory)


def import_flows() -> None:
    """Import what `deploy` reads, which takes seconds, while a server starts."""
    for deployment in deployments():
        _schema(deployment)


def _ensure(access: Access, known: str, collection: str, new: dict[str, Any]) -> Any:
    """Return the object that is known there; None when it had to be made."""
    try:
        return access.ask(known)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    try:
        access.ask(collection, new)
    except urllib.error.HTTPError as error:
        if error.code != 409:  # another command has just made it
            raise
    return None


def _schema(deployment: Deployment) -> dict[str, Any]:
    """Return the schema that the form shows; imports the flow."""
    module, _, name = deployment.entrypoint.partition(":")
    schema: dict[str, Any] = getattr(import_module(module), name).parameters.model_dump()
    return schema

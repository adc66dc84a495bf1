"""Questions to the Prefect server that the tests' runs report to."""

from __future__ import annotations

import time
from typing import Any

from flows.server_access import Access
from tests.flows.runs import Runs


def ask(runs: Runs, path: str, body: dict[str, Any] | None = None) -> Any:
    """POST to the server's API (GET without a body)."""
    return ask_patiently(access(runs), path, body)


def access(runs: Runs) -> Access:
    """The server's."""
    names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
    return Access(*(runs.environment[name] for name in names))


def ask_patiently(access: Access, path: str, body: dict[str, Any] | None = None) -> Any:
    """POST to the API (GET without a body).

    A read is repeated where no answer comes: on a loaded machine Prefect's server, which has one
    SQLite file, was seen to leave a question unanswered for more than 30 s.
    """
    reads = body is None or path.endswith("/filter")
    deadline = time.monotonic() + 120
    while True:
        try:
            return access.ask(path, body, timeout=30)
        except TimeoutError:
            if not reads or time.monotonic() > deadline:
                raise


def flow_runs(runs: Runs, name: str, state: str) -> list[dict[str, Any]]:
    """Flow runs of this name in this state; those of other tests are among them."""
    chosen = {"name": {"any_": [name]}, "state": {"type": {"any_": [state]}}}
    found: list[dict[str, Any]] = ask(runs, "flow_runs/filter", {"flow_runs": chosen})
    return found

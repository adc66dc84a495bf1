"""Questions to the Prefect server that the tests' runs report to."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.flows.runs import Runs


def ask(runs: Runs, path: str, body: dict[str, Any] | None = None) -> Any:
    """POST to the server's API (GET without a body)."""
    url = f"{runs.environment['PREFECT_API_URL']}/{path}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def flow_runs(runs: Runs, **states: list[str]) -> list[dict[str, Any]]:
    """Flow runs, those with a state such as `any_=["RUNNING"]` where one is given."""
    chosen = {"flow_runs": {"state": {"type": states}}} if states else {}
    found: list[dict[str, Any]] = ask(runs, "flow_runs/filter", chosen)
    return found

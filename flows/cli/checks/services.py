"""Prefect, MLflow and the settings that keep everything on this machine."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator, Mapping

from earl_core.system.finding import Finding
from flows.server_access import DEFAULT_URL, healthy, is_mine

_PREFECT_PORT, _MLFLOW_PORT = 4200, 5000
_TIMEOUT = 2.0


def check_services(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Servers that runs would use, their ports, offline settings."""
    yield _prefect(environment.get("PREFECT_API_URL"))
    yield from _mlflow(environment.get("MLFLOW_TRACKING_URI"))
    offline = environment.get("HF_HUB_OFFLINE")
    if offline in (None, "1"):
        yield Finding("good", "no model hub is asked: workers run with HF_HUB_OFFLINE=1")
    else:
        advice = "unset it when the machine has no network, or starts wait for time-outs"
        yield Finding("note", f"HF_HUB_OFFLINE={offline}: workers may ask the model hub", advice)


def _prefect(asked: str | None) -> Finding:
    if asked:
        if healthy(asked, timeout=_TIMEOUT):
            return Finding("good", f"Prefect answers at PREFECT_API_URL={asked}")
        advice = "start that server, or unset PREFECT_API_URL to use a temporary one"
        return Finding("blocks", f"PREFECT_API_URL={asked} does not answer", advice)
    if is_mine(DEFAULT_URL) and healthy(DEFAULT_URL):
        return Finding("good", f"Prefect answers at {DEFAULT_URL}; runs will use it")
    if _in_use(_PREFECT_PORT):
        text = f"port {_PREFECT_PORT} is taken by something that is not a Prefect server of yours"
        advice = "runs use a temporary server; for the web pages: earl server --port 4201"
        return Finding("note", text, advice)
    return Finding("good", "no Prefect server runs; each command starts a temporary one")


def _mlflow(uri: str | None) -> Iterator[Finding]:
    if not uri:
        yield Finding("good", "MLflow tracks into a file beside the runs")
    elif not uri.startswith(("http://", "https://")):
        yield Finding("good", f"MLflow tracks into {uri}")
    elif _answers(uri):
        yield Finding("good", f"MLflow answers at MLFLOW_TRACKING_URI={uri}")
    else:
        text = f"MLFLOW_TRACKING_URI={uri} does not answer: runs go on, untracked meanwhile"
        advice = "start that server, or unset MLFLOW_TRACKING_URI to track into a file"
        yield Finding("warning", text, advice)
    if _in_use(_MLFLOW_PORT) and not (uri and f":{_MLFLOW_PORT}" in uri):
        advice = f"if not by MLflow, look at runs with: mlflow ui --port {_MLFLOW_PORT + 1} …"
        yield Finding("note", f"port {_MLFLOW_PORT} is taken", advice)


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_TIMEOUT) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""Prefect, MLflow and the settings that keep everything on this machine."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator, Mapping

from flows.cli.checks.finding import Finding
from flows.server_access import DEFAULT_URL, healthy, is_mine

TOPIC = "Services"

_PREFECT_PORT, _MLFLOW_PORT = 4200, 5000
_TIMEOUT = 2.0


def check_services(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Servers that runs would use, their ports, offline settings."""
    yield from _prefect(environment.get("PREFECT_API_URL"))
    yield from _mlflow(environment.get("MLFLOW_TRACKING_URI"))
    offline = environment.get("HF_HUB_OFFLINE")
    if offline in (None, "1"):
        text = "no model hub is asked: workers run with HF_HUB_OFFLINE=1"
        yield Finding("good", TOPIC, text)
    else:
        yield Finding(
            "note",
            TOPIC,
            f"HF_HUB_OFFLINE={offline}: workers may ask the model hub",
            "unset it when the machine has no network, or starts wait for time-outs",
        )


def _prefect(asked: str | None) -> Iterator[Finding]:
    if asked:
        if healthy(asked, timeout=_TIMEOUT):
            yield Finding("good", TOPIC, f"Prefect answers at PREFECT_API_URL={asked}")
        else:
            yield Finding(
                "blocks",
                TOPIC,
                f"PREFECT_API_URL={asked} does not answer",
                "start that server, or unset PREFECT_API_URL to use a temporary one",
            )
    elif is_mine(DEFAULT_URL) and healthy(DEFAULT_URL):
        yield Finding("good", TOPIC, f"Prefect answers at {DEFAULT_URL}; runs will use it")
    elif _in_use(_PREFECT_PORT):
        yield Finding(
            "note",
            TOPIC,
            f"port {_PREFECT_PORT} is taken by something that is not a Prefect server of yours",
            "runs use a temporary server; for the web pages: earl server --port 4201",
        )
    else:
        yield Finding("good", TOPIC, "no Prefect server runs; each command starts a temporary one")


def _mlflow(uri: str | None) -> Iterator[Finding]:
    if uri and uri.startswith(("http://", "https://")):
        if _answers(uri):
            yield Finding("good", TOPIC, f"MLflow answers at MLFLOW_TRACKING_URI={uri}")
        else:
            yield Finding(
                "warning",
                TOPIC,
                f"MLFLOW_TRACKING_URI={uri} does not answer: runs go on, untracked meanwhile",
                "start that server, or unset MLFLOW_TRACKING_URI to track into a file",
            )
    elif uri:
        yield Finding("good", TOPIC, f"MLflow tracks into {uri}")
    else:
        yield Finding("good", TOPIC, "MLflow tracks into a file beside the runs")
    if _in_use(_MLFLOW_PORT) and not (uri and f":{_MLFLOW_PORT}" in uri):
        yield Finding(
            "note",
            TOPIC,
            f"port {_MLFLOW_PORT} is taken",
            f"if not by MLflow, look at runs with: mlflow ui --port {_MLFLOW_PORT + 1} …",
        )


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

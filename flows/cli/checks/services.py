"""Prefect, MLflow and the settings that keep everything on this machine."""

from __future__ import annotations

import http.client
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from earl_core.system.finding import Finding
from earl_core.system.identity import trusting
from earl_core.system.service import Service, living_service, read_services
from flows.server import access_of
from flows.server_access import DEFAULT_URL, Access, healthy, is_open
from flows.services.process import TITLES, mlflow_answers
from tasks.tracking.mlflow_client import without_login
from tasks.tracking.served import CERTIFICATE

_PREFECT_PORT, _MLFLOW_PORT = 4200, 5000
_TIMEOUT = 2.0
_AGAIN = "start it again with: earl down, then earl up"


def check_services(environment: Mapping[str, str], runs: Path) -> Iterator[Finding]:
    """Servers that runs would use, their ports, the services of `earl up`, offline settings."""
    known = {name: service for name, service in read_services(runs).items() if service.process}
    default = Access(DEFAULT_URL, environment.get("PREFECT_API_AUTH_STRING"))
    asked, certificate = (
        environment.get(f"PREFECT_API_{name}") for name in ("URL", "SSL_CERT_FILE")
    )
    prefect, mlflow = (
        known.get(name) or living_service(runs, name) for name in ("prefect", "mlflow")
    )
    yield _prefect(asked, certificate, prefect, default)
    uri = environment.get("MLFLOW_TRACKING_URI")
    trusted = environment.get(CERTIFICATE)
    yield from _mlflow(without_login(uri) if uri else None, trusted, mlflow)
    for service in known.values():
        if not service.alive:
            text = f"{TITLES[service.name]} of `earl up` has ended without `earl down`"
            yield Finding("warning", text, "start it again with: earl up")
    offline = environment.get("HF_HUB_OFFLINE")
    if offline in (None, "1"):
        yield Finding("good", "no model hub is asked: workers run with HF_HUB_OFFLINE=1")
    else:
        advice = "unset it when the machine has no network, or starts wait for time-outs"
        yield Finding("note", f"HF_HUB_OFFLINE={offline}: workers may ask the model hub", advice)


def _prefect(
    asked: str | None, certificate: str | None, own: Service | None, default: Access
) -> Finding:
    if asked:
        if healthy(asked, _TIMEOUT, certificate):
            return Finding("good", f"Prefect answers at PREFECT_API_URL={asked}")
        advice = "start that server, or unset PREFECT_API_URL to use a temporary one"
        return Finding("blocks", f"PREFECT_API_URL={asked} does not answer", advice)
    if own is not None and own.alive:
        if access_of(own).healthy(_TIMEOUT):
            return Finding("good", f"Prefect of `earl up` answers at {own.url}; runs will use it")
        return Finding("warning", f"Prefect of `earl up` at {own.url} does not answer", _AGAIN)
    if is_open(default):
        return Finding("good", f"Prefect answers at {default.url}; runs will use it")
    if _in_use(_PREFECT_PORT):
        text = f"port {_PREFECT_PORT} is taken, not by a Prefect server that lets you in"
        advice = "runs use a temporary server; for the web pages: earl up --port 4201"
        return Finding("note", text, advice)
    text = "no Prefect server runs: commands start temporary ones, `earl up` one that stays"
    return Finding("good", text)


def _mlflow(uri: str | None, certificate: str | None, own: Service | None) -> Iterator[Finding]:
    if not uri and own is not None and own.alive:
        if mlflow_answers(own):
            yield Finding("good", f"MLflow of `earl up` answers at {own.url}; runs will use it")
        else:
            yield Finding("warning", f"MLflow of `earl up` at {own.url} does not answer", _AGAIN)
        uri = own.url
    elif not uri:
        yield Finding("good", "MLflow tracks into a file beside the runs")
    elif not uri.startswith(("http://", "https://")):
        yield Finding("good", f"MLflow tracks into {uri}")
    elif _answers(uri, certificate):
        yield Finding("good", f"MLflow answers at MLFLOW_TRACKING_URI={uri}")
    else:
        text = f"MLFLOW_TRACKING_URI={uri} does not answer: runs go on, untracked meanwhile"
        advice = "start that server, or unset MLFLOW_TRACKING_URI to track into a file"
        yield Finding("warning", text, advice)
    if _in_use(_MLFLOW_PORT) and not (uri and f":{_MLFLOW_PORT}" in uri):
        advice = f"if not by MLflow, look at runs with: earl up --mlflow-port {_MLFLOW_PORT + 1}"
        yield Finding("note", f"port {_MLFLOW_PORT} is taken", advice)


def _answers(uri: str, certificate: str | None) -> bool:
    try:
        context = trusting(certificate) if certificate else None
        asked = f"{uri.rstrip('/')}/health"
        with urllib.request.urlopen(asked, timeout=_TIMEOUT, context=context) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""Whoever listens where a server of ours was hears no password, and nothing he answers is done."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from earl_core.system.identity import new_identity
from earl_core.system.processes import ProcessId
from earl_core.system.service import Service, write_services
from tests.cli.conftest import ROOT, Earl
from tests.impostor import impostor, only_root

WORD = "a-word-that-nobody-else-may-hear"

CLIENTS = """
import asyncio, os, sys
from earl_core.system.service import read_services
from flows import server
from flows.server_access import Access

server.configure(sys.argv[1])
(access,) = [
    server.access_of(each) for each in read_services(sys.argv[1]).values()
    if each.name == "prefect"
]
os.environ |= access.environment()

import flows.running
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.clients import PrefectEventsClient, PrefectEventSubscriber
from prefect.events import Event
from prefect.logging.clients import PrefectLogsSubscriber
from prefect.settings import (
    PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings
)
from earl_core.config import parse_config
from tasks.tracking.mlflow_client import default_uri, open_mlflow_run

async def asked():
    async with get_client() as client:
        await client.read_flows()

def asked_at_once():
    with get_client(sync_client=True) as client:
        client.read_flows()

async def emitted():
    async with PrefectEventsClient(reconnection_attempts=0) as client:
        await client.emit(Event(event="x", resource={"prefect.resource.id": "x"}))

async def subscribed(subscriber):
    async with subscriber as each:
        await each.__anext__()

@flow
def played():
    return 1

def tracked():
    config = parse_config({
        "name": "tracked", "iterations": 1, "runs_directory": sys.argv[1],
        "model": {"path": "model"}, "environment": {"name": "tic_tac_toe"},
        "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
    })
    uri = default_uri(config)
    assert uri.startswith("https://earl:"), uri
    open_mlflow_run(uri, "earl", "tracked", "0123456789ab", None)

clients = {
    "ask": lambda: access.ask("flows/filter", {}, timeout=5),
    "async": lambda: asyncio.run(asked()),
    "sync": asked_at_once,
    "events": lambda: asyncio.run(emitted()),
    "subscriber": lambda: asyncio.run(subscribed(PrefectEventSubscriber(reconnection_attempts=0))),
    "logs": lambda: asyncio.run(subscribed(PrefectLogsSubscriber(reconnection_attempts=0))),
    "flow": played,
    "mlflow": tracked,
    "choice": lambda: server.running_server(server.configure(sys.argv[1]), sys.argv[1], 1.0),
}
def meet(names):
    for name in names:
        try:
            clients[name]()
        except BaseException as error:
            print(name, "refused", flush=True)
            print(name, repr(error), file=sys.stderr)
        else:
            print(name, "taken in", flush=True)

meet(clients)

# A server of one's own that speaks plain HTTP, and is replaced after its first answers.
access = Access(sys.argv[2], "earl:word")
known = {PREFECT_API_URL: access.url, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
with temporary_settings(known):
    meet(["async", "sync"])
    input()
    meet(["async", "sync", "events"])
"""


class Plain(http.server.BaseHTTPRequestHandler):
    """A server of one's own: it has no flows."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def served(runs: Path, name: str, port: int) -> Service:
    """A server of `earl up` that listened at this port; its process lives."""
    address = f"127.0.0.1:{port}{'/api' if name == 'prefect' else ''}"
    certificate = runs / "services" / f"{name}.pem"
    certificate.parent.mkdir(parents=True, exist_ok=True)
    new_identity(certificate)
    return Service(
        name,
        f"http://{address}",
        "earl",
        WORD,
        str(ProcessId.current()),
        secure=f"https://{address}",
        certificate=str(certificate),
    )


@only_root
@pytest.mark.slow
def test_no_client_of_ours_takes_another_listener_for_the_server_that_was_there(
    tmp_path: Path, fresh_earl: Earl
) -> None:
    runs = tmp_path / "runs"
    environment = {"PREFECT_CLIENT_MAX_RETRIES": "0", "PREFECT_API_REQUEST_TIMEOUT": "5"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Plain) as plain, impostor(0, 0) as other:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        names = zip(("prefect", "mlflow"), other.ports, strict=True)
        write_services(runs, [served(runs, *each) for each in names])
        own = plain.server_port
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENTS, str(runs), f"http://127.0.0.1:{own}/api"],
            cwd=ROOT,
            env=fresh_earl.environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with client:
            assert client.stdout is not None
            pinned = dict(client.stdout.readline().split(maxsplit=1) for _ in range(9))
            asked = [client.stdout.readline() for _ in range(2)]
            plain.shutdown()
            plain.server_close()
            with impostor(own) as later:
                shown, errors = client.communicate("\n", timeout=240)
    assert set(pinned.values()) == {"refused\n"}, (pinned, errors)
    # They came, and went away at the sight of its certificate.
    assert all(other.whats(port) == {"tls"} for port in other.ports), other.heard
    assert asked == ["async taken in\n", "sync taken in\n"], errors
    assert shown.splitlines() == ["async refused", "sync refused", "events refused"], errors
    assert errors.count(f"another user listens at port {own} now") == 3
    assert later.heard == []


def test_a_key_lies_on_no_disk_and_each_start_has_its_own(tmp_path: Path) -> None:
    certificate = tmp_path / "server.pem"
    shown = []
    for _ in range(2):
        new_identity(certificate)
        shown.append(certificate.read_bytes())
        assert certificate.stat().st_mode & 0o777 == 0o600
        assert b"PRIVATE" not in certificate.read_bytes()
    assert shown[0] != shown[1]
    assert os.listdir(tmp_path) == ["server.pem"]

"""`earl up`, `earl status`, `earl down`: one set of services for all tests, in their order."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from earl_core.dispatch.segments.pool_directory import write_mark
from earl_core.system.processes import ProcessId, boot_id, start_time
from earl_core.system.service import Service, read_services, write_services
from flows.server import access_of
from tests.cli.conftest import CONFIG, Earl
from tests.impostor import impostor
from tests.shared import free_port

RUN_SECONDS = 300.0
WORKER_SECONDS = 300.0


def answer(
    url: str, login: str | None = None, body: dict[str, Any] | None = None, **headers: str
) -> int:
    """The status; a body is sent as JSON."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    if login is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) == 0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, shared_memory: Path) -> Earl:
    """`earl` in a directory of its own, without a server."""
    return Earl(tmp_path_factory.mktemp("services"), shared_memory)


@pytest.fixture(scope="module")
def services(here: Earl) -> Iterator[dict[str, Service]]:
    """What `earl up` started; whatever of it is left at the end is ended."""
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    done = here.run("up", *ports)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        known = read_services(here.directory / "runs")
        assert all(service.alive for service in known.values())
        for service in known.values():
            assert service.url.removesuffix("/api") in done.stdout
            assert not service.password or service.password not in done.stdout
        yield known
    finally:
        here.run("down")


@pytest.mark.slow
def test_both_servers_want_a_password_and_know_their_name(services: dict[str, Service]) -> None:
    prefect, mlflow = services["prefect"], services["mlflow"]
    login = f"earl:{mlflow.password}"
    assert answer(f"{prefect.url}/admin/version") == 401
    assert answer(f"{prefect.url}/admin/version", f"earl:{prefect.password}") == 200
    search = f"{mlflow.url}/api/2.0/mlflow/experiments/search"
    for wrong in (None, "earl:wrong", "admin:password", "admin:password1234"):
        assert answer(f"{mlflow.url}/", wrong) == 401
        assert answer(search, wrong, {"max_results": 1}) == 401
    assert answer(f"{mlflow.url}/", login) == 200
    assert answer(search, login, {"max_results": 1}) == 200
    assert answer(search, login, {"max_results": 1}, Origin=mlflow.url) == 200
    for origin in ("http://other.example", "http://127.0.0.1:1", "null"):
        assert answer(search, login, {"max_results": 1}, Origin=origin) == 403
    assert answer(search, login, {"max_results": 1}, Host="other.example") == 403


@pytest.mark.slow
def test_what_only_its_user_may_know_only_its_user_can_read(
    here: Earl, services: dict[str, Service]
) -> None:
    state = here.directory / "runs" / "services"
    assert [path for path in (state, *state.rglob("*")) if path.stat().st_mode & 0o077] == []
    for service in services.values():
        for process in service.processes():
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert all(s.password.encode() not in line for s in services.values() if s.password)


@pytest.mark.slow
def test_a_deployment_runs_and_its_run_is_in_mlflow(
    here: Earl, services: dict[str, Service]
) -> None:
    access = access_of(services["prefect"])
    settings = here.settings(iterations="1", evaluation__every="0", evaluation__episodes="2")
    deployment = access.ask("deployments/name/train/train")
    created = access.ask(
        f"deployments/{deployment['id']}/create_flow_run",
        {
            "parameters": {
                "config": str(CONFIG),
                "name": "worked",
                "overrides": [part for part in settings if part != "--set"],
            }
        },
    )
    deadline = time.monotonic() + RUN_SECONDS
    while (run := access.ask(f"flow_runs/{created['id']}"))["state_type"] != "COMPLETED":
        assert run["state_type"] in ("SCHEDULED", "PENDING", "RUNNING"), run["state"]
        assert time.monotonic() < deadline, run["state"]
        time.sleep(0.2)
    tracking = json.loads((here.directory / "runs" / "worked" / "run.json").read_text())["tracking"]
    assert tracking["uri"] == services["mlflow"].url
    mlflow = services["mlflow"]
    page = f"{mlflow.url}/api/2.0/mlflow/runs/get?run_id={tracking['run_id']}"
    assert answer(page, f"earl:{mlflow.password}") == 200
    # The database that a run without the server would use, and no password in any file of a run.
    with sqlite3.connect(here.directory / "runs" / "mlflow.db") as database:
        found = database.execute("select artifact_uri from runs").fetchone()[0]
    assert found.startswith(f"file://{here.directory}/runs/mlartifacts/")
    files = [path for path in (here.directory / "runs" / "worked").rglob("*") if path.is_file()]
    assert all(mlflow.password.encode() not in path.read_bytes() for path in files)


@pytest.mark.slow
def test_status_shows_services_runs_and_shared_memory(
    here: Earl, services: dict[str, Service]
) -> None:
    store = here.shared_memory / "0123456789ab"
    store.mkdir(parents=True)
    write_mark(store, here.directory / "runs" / "worked")
    shown = json.loads(here.run("status", "--json").stdout)
    assert {row["service"]: row["state"] for row in shown["services"]} == dict.fromkeys(
        services, "running"
    )
    (run,) = shown["runs"]
    assert (run["run"], run["state"], run["iterations"]) == ("worked", "finished", 1)
    assert any(row["run"].endswith("/runs/worked") for row in shown["shared_memory"])
    assert "worked" in here.run("status").stdout


@pytest.mark.slow
def test_a_worker_ends_with_its_server_and_up_starts_both_anew(
    here: Earl, services: dict[str, Service], tmp_path: Path
) -> None:
    killed, worker = ProcessId.parse(services["prefect"].process), services["worker"]
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    elsewhere = Earl(tmp_path, here.shared_memory)
    elsewhere.environment["XDG_STATE_HOME"] = here.environment["XDG_STATE_HOME"]
    up = "up", "--runs-directory", str(here.directory / "runs")
    ports = [
        urlsplit(where).port or 0 for where in (services["prefect"].url, services["prefect"].secure)
    ]
    with impostor(*ports) if os.geteuid() == 0 else nullcontext() as other:
        deadline = time.monotonic() + WORKER_SECONDS
        while worker.processes():
            assert time.monotonic() < deadline, "the worker goes on"
            time.sleep(0.1)
        if other is not None:
            refused = elsewhere.run(*up)
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
            assert "the user nobody listens there" in refused.stderr
            # At most a handshake that it could not finish.
            assert other.whats() <= {"tls"}, other.heard
    done = elsewhere.run(*up)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MLflow's server runs already" in done.stdout
    now = read_services(here.directory / "runs")
    assert now["mlflow"] == services["mlflow"]
    assert now["worker"].process != worker.process
    assert now["prefect"].process != services["prefect"].process
    assert now["prefect"].url == services["prefect"].url
    assert now["prefect"].password != services["prefect"].password
    access = access_of(now["prefect"])
    (step,) = access.ask("deployments/name/train/train")["pull_steps"]
    assert list(step.values()) == [{"directory": str(tmp_path)}]
    seen = json.loads(elsewhere.run("status", "--json").stdout)["services"]
    assert [row["address"] for row in seen[:2]] == [access.site, now["mlflow"].url]
    assert f"earl down --runs-directory {here.directory / 'runs'}" in elsewhere.run("down").stdout
    old = f"earl:{services['prefect'].password}"
    assert answer(f"{access.site}/api/admin/version", old) == 401


@pytest.mark.slow
def test_down_ends_all_of_it(here: Earl, services: dict[str, Service]) -> None:
    known = read_services(here.directory / "runs")
    done = here.run("down")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has ended") == 3
    assert not any(service.processes() for service in known.values())
    assert not any(listens(service.url) for service in known.values())
    assert "Nothing" in here.run("down").stdout
    assert not (here.directory / "runs" / "services" / "login.env").exists()
    shown = json.loads(here.run("status", "--json").stdout)
    assert {row["state"] for row in shown["services"]} == {"none"}


def test_a_process_that_has_the_pid_by_now_is_left_alone(fresh_earl: Earl) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as foreign:
        try:
            started = start_time(foreign.pid)
            assert started is not None
            known = Service("mlflow", "http://127.0.0.1:9", "earl", "word", mark="0123456789abcdef")
            known = replace(known, process=str(ProcessId(boot_id(), foreign.pid, started + 1)))
            runs = fresh_earl.directory / "runs"
            write_services(runs, [known])
            done = fresh_earl.run("down")
            assert (done.returncode, foreign.poll()) == (0, None)
            assert "Nothing" in done.stdout
            assert read_services(runs)["mlflow"] == known.ended()
        finally:
            foreign.kill()


@pytest.mark.parametrize("option", ["--port", "--mlflow-port"])
def test_a_port_in_use_is_one_sentence(fresh_earl: Earl, option: str) -> None:
    ports = {"--port": str(free_port()), "--mlflow-port": str(free_port())}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[option] = str(taken.getsockname()[1])
        done = fresh_earl.run("up", *(part for item in ports.items() for part in item))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"choose another with {option}" in done.stderr
    assert not any(s.process for s in read_services(fresh_earl.directory / "runs").values())

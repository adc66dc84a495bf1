"""The files for containers, as far as they can be looked at where no Docker runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import prefect.settings
import pytest
import yaml

from flows.services.process import END_SECONDS
from flows.services.worker import STOP_FLOWS_SECONDS
from tests.cli.conftest import ROOT

DOCKER = ROOT / "docker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


def test_the_image_takes_what_there_is() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command == "COPY" and not arguments[0].startswith("--"):
            for source in arguments[:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in allowed, source
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    assert "USER earl" in text
    # The last words of a build argument are those that the installer takes.
    assert 'requirements/install.py "${VLLM}"' in text


def test_services_want_a_password_and_listen_here_only(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"prefect", "mlflow", "worker"}
    for service in compose["services"].values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
    text = (DOCKER / "compose.yaml").read_text()
    for name in ("PREFECT_AUTH", "MLFLOW_PASSWORD", "MLFLOW_SECRET"):
        assert f"${{{name}:?" in text
    assert compose["services"]["worker"]["shm_size"].startswith("${SHM_SIZE:-")
    named = {volume.split(":")[0] for s in compose["services"].values() for volume in s["volumes"]}
    assert named == set(compose["volumes"])


def test_one_build_serves_all_and_each_service_has_time_to_end(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert len({service["image"] for service in services.values()}) == 1
    assert [name for name, service in services.items() if "build" in service] == ["worker"]
    # Where it is missing, the name belongs to somebody else's image at Docker's registry.
    assert {service["pull_policy"] for service in services.values()} == {"never"}
    seconds = {"s": 1, "m": 60}
    for name, service in services.items():
        grace = service["stop_grace_period"]
        least = END_SECONDS + STOP_FLOWS_SECONDS if name == "worker" else END_SECONDS
        assert int(grace[:-1]) * seconds[grace[-1]] > least, name


def test_every_service_is_asked_how_it_is(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        command, *arguments = service["healthcheck"]["test"]
        assert (command, arguments[:2]) == ("CMD", ["python", "-c"]), name
        compile(arguments[2], name, "exec")
    worker = compose["services"]["worker"]
    assert "--with-healthcheck" in worker["command"][0]
    settings = prefect.settings.Settings().worker.webserver
    assert f"127.0.0.1:{settings.port}/health" in worker["healthcheck"]["test"][-1]
    assert worker["environment"]["PREFECT_WORKER_WEBSERVER_HOST"] == "127.0.0.1"


def test_shell_commands_of_the_services_are_whole(compose: dict[str, Any]) -> None:
    for name in ("mlflow", "worker"):
        (script,) = compose["services"][name]["command"]
        script = script.replace("$$", "$")
        subprocess.run(["sh", "-n", "-c", script], check=True)
        assert "exec " in script.splitlines()[-1] or "exec " in script

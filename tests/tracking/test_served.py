"""Where clients of MLflow ask the server of `earl up`, and whom they believe."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from earl_core.config import parse_config
from earl_core.system.processes import ProcessId
from earl_core.system.service import Service, write_services
from tasks.tracking import served
from tasks.tracking.mlflow_client import default_uri, without_login

PAGES, SECURE, OUTSIDE = "http://127.0.0.1:5000", "https://127.0.0.1:5999", "https://mlflow.example"
SERVER = Service(
    "mlflow",
    PAGES,
    "earl",
    "swordfish-1",  # no word of a text: what is known is hidden wherever it stands
    str(ProcessId.current()),
    since=1.0,
    secure=SECURE,
    certificate="/nowhere/mlflow.pem",
)
DEAD = replace(SERVER, process=SERVER.process + "1")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(served.CERTIFICATE, raising=False)
    monkeypatch.setattr(served, "_served", {})


def asked(runs: Path, given: str | None = None) -> str:
    tracking = {"tracking": {"uri": given}} if given else {}
    config = {
        "name": "x",
        "iterations": 1,
        "runs_directory": str(runs),
        "model": {"path": "model"},
        "environment": {"name": "tic_tac_toe"},
        "rollout": {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1},
    }
    return default_uri(parse_config(config | tracking))


@pytest.mark.parametrize("given", [None, PAGES, f"{PAGES}/", SECURE])
def test_the_server_is_asked_where_it_alone_answers_and_shown_by_its_pages(
    tmp_path: Path, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    write_services(runs, [SERVER])
    address = "https://earl:swordfish-1@127.0.0.1:5999"
    for place in (runs, elsewhere):
        assert asked(place, given) == address
        assert without_login(address) == PAGES
    if given:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        assert asked(runs) == address
    # Dead, it is meant all the same where it was named, so that nobody else hears a password.
    write_services(runs, [DEAD])
    database = f"sqlite:///{runs / 'mlflow.db'}"
    assert asked(runs, given) == (address if given else database)
    assert asked(runs, OUTSIDE) == OUTSIDE


def test_a_server_without_a_certificate_is_not_asked(tmp_path: Path) -> None:
    write_services(tmp_path, [replace(SERVER, certificate="")])
    assert asked(tmp_path).startswith("sqlite:///")


def test_a_run_that_goes_on_reads_the_new_password(tmp_path: Path) -> None:
    write_services(tmp_path, [SERVER])
    first = asked(tmp_path)
    write_services(tmp_path, [DEAD])
    assert served.renewed(first, tmp_path) == first
    write_services(
        tmp_path, [replace(SERVER, password="swordfish-2", secure="https://127.0.0.1:6000")]
    )
    second = served.renewed(first, tmp_path)
    assert second == "https://earl:swordfish-2@127.0.0.1:6000"
    assert without_login(second) == without_login(first) == PAGES
    assert served.renewed(OUTSIDE, tmp_path) == OUTSIDE


def test_the_certificate_is_believed_of_that_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_services(tmp_path, [SERVER])
    ours = asked(tmp_path)
    for uri, known in ((ours, SERVER.certificate), (OUTSIDE, None), (ours, SERVER.certificate)):
        served.trust_server_of(uri)
        assert os.environ.get(served.CERTIFICATE) == known
    monkeypatch.setenv(served.CERTIFICATE, "/somebody/elses.pem")
    served.trust_server_of(OUTSIDE)
    assert os.environ[served.CERTIFICATE] == "/somebody/elses.pem"

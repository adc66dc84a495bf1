"""Flow runs that nobody tells the server of get the state that this machine knows."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from earl_core.run.record import write_record
from earl_core.system.processes import ProcessId
from flows import flow_ledger, reaper, server
from flows.flow_ledger import Note, owner_tags
from flows.server_access import Access
from tests.cli.conftest import CONFIG, Earl


@pytest.fixture
def access(prefect_server: server.Server) -> Access:
    return prefect_server.access


@pytest.fixture(scope="module")
def gone() -> str:
    """A process that has ended."""
    known = "from earl_core.system.processes import ProcessId; print(ProcessId.current())"
    shown = subprocess.run(
        [sys.executable, "-c", known], capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


def running(access: Access, tags: list[str], name: str = "train") -> str:
    """The id of a flow run that the server takes for Running."""
    flow = access.ask("flows/", {"name": name})
    state = {"type": "RUNNING", "name": "Running"}
    body = {"flow_id": flow["id"], "state": state, "tags": tags}
    return str(access.ask("flow_runs/", body)["id"])


def state_of(access: Access, flow_run: str) -> str:
    return str(access.ask(f"flow_runs/{flow_run}")["state_type"])


def tags_of(process: str, runs: Path) -> list[str]:
    return [tag.replace(str(ProcessId.current()), process) for tag in owner_tags(runs)]


def test_each_flow_run_gets_the_state_of_its_ledger(
    access: Access, gone: str, tmp_path: Path
) -> None:
    def noted(outcome: str | None, run: str = "", process: str = gone) -> str:
        identity = running(access, tags_of(process, tmp_path))
        host = socket.gethostname()
        note = Note(identity, host, process, run, outcome=outcome)
        flow_ledger.write(tmp_path, note)
        return identity

    (tmp_path / "done").mkdir()
    write_record(tmp_path / "done", {"uid": "0", "finished": True})
    me = str(ProcessId.current())
    ended_by_mistake = noted(None, process=me)
    crashed = {"state": {"type": "CRASHED", "name": "Crashed"}, "force": True}
    access.ask(f"flow_runs/{ended_by_mistake}/set_state", crashed)
    elsewhere = running(
        access, [tag.replace(socket.gethostname(), "x") for tag in tags_of(gone, tmp_path)]
    )
    expected = {
        noted(None): "CRASHED",
        noted(None, str(tmp_path / "done")): "COMPLETED",
        noted("CANCELLED"): "CANCELLED",
        noted("FAILED"): "FAILED",
        noted(None, process=me): "RUNNING",
        ended_by_mistake: "RUNNING",
        running(access, tags_of(gone, tmp_path)): "CRASHED",
        running(access, tags_of(me, tmp_path)): "RUNNING",
        running(access, tags_of(gone, tmp_path / "others")): "RUNNING",
        running(access, ["mine"]): "RUNNING",
        elsewhere: "RUNNING",
    }
    reaper.reconcile(access, tmp_path)
    assert {flow_run: state_of(access, flow_run) for flow_run in expected} == expected
    left = {note.flow_run for note in flow_ledger.read_all(tmp_path)}
    assert len(left) == 2, "only those of live processes"
    assert reaper.reconcile(access, tmp_path) == []


def test_a_live_process_corrects_others(
    access: Access, gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reaper.EVERY_SECONDS + 10 < 60
    monkeypatch.setattr(reaper, "EVERY_SECONDS", 0.2)
    reaper.keep_reconciled(access, tmp_path)
    killed = running(access, tags_of(gone, tmp_path))
    until(lambda: state_of(access, killed) == "CRASHED", 120)


@pytest.mark.parametrize("noted", [None, "FAILED", "killed"])
def test_a_retry_is_left_to_the_process_that_will_take_it(
    access: Access, gone: str, tmp_path: Path, noted: str | None
) -> None:
    """What is known of the attempt before says nothing of one that waits or has just begun."""
    retried = running(access, tags_of(gone, tmp_path))
    if noted is not None:
        outcome = None if noted == "killed" else noted
        host = socket.gethostname()
        flow_ledger.write(tmp_path, Note(retried, host, gone, outcome=outcome))
    for state in ("FAILED", "SCHEDULED", "PENDING", "RUNNING"):
        body = {"state": {"type": state, "name": state.capitalize()}, "force": True}
        access.ask(f"flow_runs/{retried}/set_state", body)
        reaper.reconcile(access, tmp_path)
        assert state_of(access, retried) == state
    assert flow_ledger.read(tmp_path, retried) is None


def until(true: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_any_command_corrects_what_it_finds(earl: Earl, access: Access, gone: str) -> None:
    killed = running(access, tags_of(gone, earl.directory / "runs"))
    (earl.directory / "runs" / "prefect").mkdir(parents=True, exist_ok=True)

    def corrected() -> bool:
        """A command does not wait for a busy server: then the next one corrects it."""
        assert earl.run("shards", "list", "--directory", str(earl.shared_memory)).returncode == 0
        return state_of(access, killed) == "CRASHED"

    until(corrected, 120)


SLOW = """
import time
def build(path, **options):
    print("building", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_run_stopped_while_its_first_worker_starts_is_cancelled(
    earl: Earl, access: Access
) -> None:
    (earl.directory / "slow_model.py").write_text(SLOW)
    changes = {
        "model.path": "none",
        "model.builder": "slow_model:build",
        "model.builder_options": "{}",
    }
    sets = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    settings = [*earl.settings()[-4:], *sets]
    process = earl.start("train", str(CONFIG), "--name", "slow", "--plain", *settings)
    logs = earl.directory / "runs" / "slow" / "logs"
    until(lambda: any("building" in p.read_text() for p in logs.rglob("*.log")), 120)
    (note,) = [n for n in flow_ledger.read_all(earl.directory / "runs") if n.run.endswith("/slow")]
    assert state_of(access, note.flow_run) == "RUNNING"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 128 + signal.SIGINT, output
    # One that could not end in time has left the word, and any command tells the server.
    reaper.reconcile(access, earl.directory / "runs")
    assert state_of(access, note.flow_run) == "CANCELLED", output
    assert reaper.reconcile(access, earl.directory / "runs") == []
    assert flow_ledger.read(earl.directory / "runs", note.flow_run) is None
    ledger = (earl.directory / "runs" / "slow" / "ledger.jsonl").read_text()
    assert '"interrupted"' in ledger


def test_a_second_signal_leaves_the_word_for_the_next_command(
    access: Access, gone: str, tmp_path: Path
) -> None:
    note = replace(flow_ledger.note_of(running(access, owner_tags(tmp_path))), process=gone)
    flow_ledger.write(tmp_path, note)
    flow_ledger.end(tmp_path, note, "CANCELLED")
    flow_ledger.end(tmp_path, note, "FAILED")
    reaper.reconcile(access, tmp_path)
    assert state_of(access, note.flow_run) == "CANCELLED"

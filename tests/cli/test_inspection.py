"""`earl runs` and `earl config`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from earl_core.config import load_config, parse_config
from earl_core.run.lock import RunLock
from earl_core.run.record import Journal, write_record
from earl_core.run.told_progress import ToldProgress
from flows.cli.app import app
from tests.cli.conftest import CONFIG


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of runs, the working directory's."""
    monkeypatch.chdir(tmp_path)
    for name in ("young", "busy", "over"):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(CONFIG.read_text())
    metrics = Journal(tmp_path / "runs/over/metrics.jsonl")
    for number in range(3):
        metrics.append({"iteration": number, "time": 2e9 + number, "rollout/return/mean": -0.5})
    write_record(tmp_path / "runs/over", {"uid": "0" * 12, "finished": True})
    return tmp_path / "runs"


def test_a_run_whose_iterations_overlap_says_what_each_is_doing(runs: Path) -> None:
    ledger = Journal(runs / "busy" / "ledger.jsonl")
    told = [
        (1, 11, "update", "started"),
        (2, 12, "rollout", "started"),
        (2, 12, "rollout", "sealed"),
        (2, 12, "update", "started"),
        (2, 13, "rollout", "started"),
        (2, 13, "rollout", "engine 1 played prompts 0 to 3 in 1.000 s"),
    ]
    for attempt, iteration, stage, event in told:
        line = {"attempt": attempt, "iteration": iteration, "stage": stage, "event": event}
        ledger.append({"time": 1e9, **line})
    tell = ToldProgress(runs / "busy", lambda stage, iteration, event: None)
    tell("rollout", 13, {"episodes_done": 39, "episodes": 64})
    lock = RunLock(runs / "busy")
    try:
        listed = json.loads(run("runs", "--json")[1])
        table = " ".join(run("runs")[1].split())
    finally:
        lock.release()
    doing = {each["name"]: each["doing"] for each in listed}
    assert doing == {"young": [], "busy": ["12: update", "13: rollout 61 %"], "over": []}
    assert "12: update, 13: rollout 61 %" in table
    (runs / "busy" / "progress.json").write_text("[1")
    lock = RunLock(runs / "busy")
    try:
        assert '13: rollout"' in run("runs", "--json")[1]
    finally:
        lock.release()


def test_runs_with_state_iterations_return_and_size(runs: Path) -> None:
    lock = RunLock(runs / "busy")
    try:
        code, text = run("runs", "--json")
        _, table = run("runs")
    finally:
        lock.release()
    assert code == 0, text
    listed = json.loads(text)
    assert listed[0]["name"] == "over", "the newest stands first"
    assert {each["name"]: each["state"] for each in listed} == {
        "young": "stopped",
        "busy": "training",
        "over": "finished",
    }
    assert (listed[0]["iterations_done"], listed[0]["iterations"]) == (3, 40)
    assert listed[0]["mean_return"] == -0.5
    assert listed[0]["changed"] == "2033-05-18T03:33:22+00:00"
    assert listed[0]["size_bytes"] == sum(f.stat().st_size for f in (runs / "over").iterdir())
    assert "3 of 40" in table
    assert "-0.50" in table


def test_no_runs(tmp_path: Path) -> None:
    code, text = run("runs", "--runs-directory", str(tmp_path))
    assert (code, text.strip()) == (0, f"There are no runs in {tmp_path}/.")
    code, text = run("runs", "--runs-directory", str(tmp_path / "none"))
    assert code == 2
    assert "--runs-directory" in text


def test_a_configuration_is_shown_whole_with_its_references(runs: Path) -> None:
    setting = "environment.options={opponent: perfect, token: env:NO_SUCH_VARIABLE}"
    code, text = run("config", "show", "tictactoe_tiny", "--set", setting)
    assert code == 0, text
    assert "token: env:NO_SUCH_VARIABLE" in text
    assert parse_config(yaml.safe_load(text)) == load_config("tictactoe_tiny", [setting])
    code, text = run("config", "show", "young", "--json")
    assert (code, json.loads(text)["name"]) == (0, "young"), "a run has the name of its directory"
    code, text = run("config", "show", "nothing")
    assert code == 2
    assert "tictactoe_tiny" in text


def test_the_schema_takes_the_recipes_and_refuses_others(runs: Path) -> None:
    code, text = run("config", "schema")
    assert code == 0, text
    schema = json.loads(text)
    for file in CONFIG.parent.glob("*.yaml"):
        recipe = yaml.safe_load(file.read_text())
        jsonschema.validate(recipe, schema)
    with pytest.raises(jsonschema.ValidationError, match="temprature"):
        jsonschema.validate({**recipe, "temprature": 1}, schema)


def test_two_configurations_are_compared(runs: Path) -> None:
    code, text = run("config", "diff", "tictactoe_tiny", "demo", "--json")
    assert code == 0, text
    found = json.loads(text)
    assert found["rollout.engine"] == ["torch", "vllm"]
    assert "seed" not in found
    code, text = run("config", "diff", "young", "runs/over")
    assert code == 0, text
    assert text.splitlines()[-1] == "1 setting differs."
    assert run("config", "diff", "demo", "demo")[1].strip() == "They are equal."

"""Commands that look import nothing that a run file names, nor what lies beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from earl_core.config import parse_config
from earl_core.config.code import named_code
from earl_core.environments.registry import create
from earl_core.environments.rewards.reward_functions import RewardFunctions
from earl_core.environments.tools.functions import load_tool
from earl_core.run.record import Journal, write_record
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import looking
from flows.cli.app import app
from tests.cli.conftest import CONFIG

CANARY = "from pathlib import Path\nPath({marker!r}).open('a').write(__name__ + '\\n')\n"
BESIDE = ("sitecustomize", "usercustomize", "pynvml", "textarena", "flash_attn_interface")

NAMING: dict[str, dict[str, Any]] = {
    "environment": {"environment": {"name": "canary:World"}},
    "process": {"environment": {"name": "subprocess:Popen", "options": {"args": ["touch", "ran"]}}},
    "function": {"environment": {"name": "os:system", "options": {"command": "touch ran"}}},
    "agent": {"environment": {"agent": "canary:run"}},
    "tool": {"environment": {"name": "tic_tac_toe", "tools": ["canary:tool"]}},
    "server": {"environment": {"name": "tic_tac_toe", "mcp": [{"command": ["touch", "ran"]}]}},
    "interpreter": {"environment": {"name": "tic_tac_toe", "python": "./python"}},
    "option": {
        "environment": {
            "name": "prompt",
            "options": {"path": "rows.jsonl", "reward_function": "canary:score"},
        }
    },
    "program": {"environment": {"agent": "program", "options": {"command": ["./python"]}}},
    "tasks": {"environment": {"agent": "task_directories", "options": {"command": ["x"]}}},
    "gymnasium": {"environment": {"name": "gymnasium", "options": {"id": "canary:Cart-v1"}}},
    "evaluation": {"evaluation": {"options": {"opponent": "canary:move"}}},
    "suite": {
        "evaluation": {
            "suites": [{"label": "s", "name": "canary:World", "prompts": 2, "attempts": 1}]
        }
    },
    "reward": {"reward": {"functions": [{"function": "canary:score", "weight": 1.0}]}},
    "scorer": {
        "reward": {"functions": [{"function": "judge", "weight": 1.0}], "python": "./python"}
    },
    "estimator": {"algorithm": {"advantage": "canary:Estimator"}},
    "loss": {"algorithm": {"policy_loss": {"name": "canary:Loss"}}},
    "aggregation": {"algorithm": {"aggregation": "canary:Sum"}},
    "placement": {"stages": {"placement": "canary:APART"}},
    "kl": {"algorithm": {"kl": {"placement": "loss", "coefficient": 0.1, "estimator": "canary:K"}}},
    "builder": {"model": {"builder": "canary:build"}},
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that say when they are imported."""
    marker = tmp_path / "ran"
    for name in ("canary", *BESIDE):
        (tmp_path / f"{name}.py").write_text(CANARY.format(marker=str(marker)))
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho program >> {marker}\n")
    program.chmod(0o755)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    # As the command `earl` has it.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return marker


def merged(change: dict[str, Any]) -> dict[str, Any]:
    raw = yaml.safe_load(CONFIG.read_text())
    for section, keys in change.items():
        if section == "environment":
            raw[section] = keys
        else:
            raw[section] = {**raw.get(section, {}), **keys}
    return dict(raw)


@pytest.mark.parametrize("named", NAMING)
def test_each_key_that_names_code_is_known(named: str) -> None:
    with looking():
        (key,) = named_code(parse_config(merged(NAMING[named])))
    assert key.split(".")[0] in NAMING[named] or key == "evaluation.suites.s.name"


@pytest.mark.parametrize("first", ["environment", "process", "agent"])
def test_looking_runs_nothing(beside: Path, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its other findings are not what this is about, and take a second each.
    for other in ("packages", "machine", "shared_memory", "services"):
        monkeypatch.setattr(f"flows.cli.doctor.check_{other}", lambda *_: [])
    raw = merged(NAMING[first])
    for named in (
        "suite",
        "reward",
        "estimator",
        "loss",
        "aggregation",
        "kl",
        "builder",
        "placement",
    ):
        for section, keys in NAMING[named].items():
            raw[section] = {**raw.get(section, {}), **keys}
    file, run = Path("run.yaml"), Path("runs/one")
    run.mkdir(parents=True)
    for path in (file, run / "config.yaml"):
        path.write_text(yaml.safe_dump(raw))
    Journal(run / "metrics.jsonl").append({"iteration": 0, "time": 2e9})
    write_record(run, {"uid": "0" * 12, "finished": True})
    shown = {}
    for arguments in (
        *(["doctor", str(file)], ["plan", str(file)], ["config", "show", str(file)]),
        *(["config", "diff", str(file), str(run)], ["report", str(run)], ["runs"]),
        *(["plan", str(run)], ["export", str(run)], ["status"]),
    ):
        result = CliRunner().invoke(app, arguments)
        assert not result.exception or isinstance(result.exception, SystemExit), arguments
        shown[" ".join(arguments[:2])] = result.output
    assert not beside.exists(), beside.read_text()
    assert "canary" not in sys.modules
    assert "names code, which was not imported" in " ".join(shown["doctor run.yaml"].split())
    assert "canary:Estimator" in shown["config show"]


def test_a_look_at_a_built_in_environment_runs_nothing_that_lies_beside(beside: Path) -> None:
    Path("run.yaml").write_text(CONFIG.read_text())
    result = CliRunner().invoke(app, ["doctor", "run.yaml"])
    assert "environment tic_tac_toe" in result.output
    assert not beside.exists(), beside.read_text()


def test_the_doctor_runs_what_it_is_told_to(beside: Path) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(merged(NAMING["estimator"])))
    result = CliRunner().invoke(app, ["doctor", "run.yaml", "--run-code"])
    assert "has no attribute 'Estimator'" in " ".join(result.output.split())
    assert beside.read_text() == "canary\n"


@pytest.mark.parametrize(
    "named",
    [
        "subprocess:Popen",
        "os:system",
        "builtins:exec",
        "os:posix_spawn",
        "shutil:rmtree",
        "pathlib:Path",
        "tempfile:TemporaryDirectory",
        "unittest.mock:MagicMock",
        "earl_core.system.import_path:os.system",
        "earl_core.run.lock:RunLock",
        "tests.cli.test_looking:merged",
    ],
)
def test_what_is_nothing_of_the_kind_is_refused_before_it_is_called(
    named: str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    refused = (
        lambda: create(named, {"args": ["touch", str(mark)]}),
        lambda: create(f"agent:{named}", {}),
        lambda: load_tool(named),
        lambda: parse_config(merged({"algorithm": {"advantage": named}})),
        lambda: parse_config(merged({"algorithm": {"policy_loss": named}})),
        lambda: parse_config(merged({"algorithm": {"aggregation": named}})),
        lambda: RewardFunctions([{"label": "r", "function": named, "options": {"a": "b"}}], 1.0),
    )
    for each in refused:
        with pytest.raises(ConfigError):
            each()
    assert not mark.exists()


@pytest.mark.parametrize("named", ["subprocess:run", "subprocess:call", "os:execlp", "print:print"])
def test_functions_that_take_anything_are_refused_too(named: str) -> None:
    with pytest.raises(ConfigError):
        RewardFunctions([{"label": "r", "function": named, "options": {}}], 1.0)
    with pytest.raises(ConfigError):
        create(f"agent:{named}", {})

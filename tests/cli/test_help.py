"""Help, and what the command line imports."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.cli.conftest import ROOT, Earl

COMMANDS = ("init", "train", "resume", "evaluate", "play", "report", "shards", "env", "doctor")


def test_help_names_every_command_and_is_quick(fresh_earl: Earl) -> None:
    fresh_earl.run("--help")
    started = time.monotonic()
    shown = fresh_earl.run("--help")
    seconds = time.monotonic() - started
    assert shown.returncode == 0
    assert all(f"│ {name} " in shown.stdout for name in COMMANDS)
    assert seconds < 10.0, "on an idle machine 0.4 s; prefect was probably imported"


@pytest.mark.parametrize(
    "command", [*COMMANDS, "shards list", "shards show", "shards sweep", "env check"]
)
def test_every_command_has_help(fresh_earl: Earl, command: str) -> None:
    shown = fresh_earl.run(*command.split(), "--help")
    assert shown.returncode == 0
    assert "Usage: earl" in shown.stdout


def test_wrong_usage_exits_with_2(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("train")
    assert shown.returncode == 2
    assert "config" in shown.stderr


def test_only_commands_that_need_prefect_import_it() -> None:
    modules = "app,doctor,shards,playing,training,evaluating,flow_command,errors"
    code = "; ".join(f"import flows.cli.{name}" for name in modules.split(","))
    assert _imported(code) & {"prefect", "mlflow", "torch", "transformers", "vllm"} == set()


def test_the_flow_process_imports_no_torch() -> None:
    found = _imported("import flows.train, flows.evaluate, flows.cli.training")
    assert "prefect" in found
    assert found & {"torch", "transformers", "vllm"} == set()


def _imported(code: str) -> set[str]:
    code += "; import sys; print(' '.join(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(shown.stdout.split())

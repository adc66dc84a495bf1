"""Help, and what the command line imports."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.cli.conftest import ROOT, Earl

COMMANDS = (
    *("init", "up", "down", "status", "runs", "config", "train", "resume", "fork", "evaluate"),
    *("rescore", "play", "report", "compare", "bisect", "export", "debug", "shards", "env"),
    "doctor",
)


def test_help_names_every_command(fresh_earl: Earl) -> None:
    command, where = fresh_earl.command("--help"), fresh_earl.directory
    environment = fresh_earl.environment
    shown = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0
    assert all(f"│ {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    "command", [*COMMANDS, "config diff", "shards list", "shards show", "shards sweep", "env check"]
)
def test_every_command_has_help(fresh_earl: Earl, command: str) -> None:
    shown = fresh_earl.run(*command.split(), "--help")
    assert shown.returncode == 0
    assert "Usage: earl" in shown.stdout


def test_versions_are_told_without_imports(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("--version")
    assert shown.returncode == 0
    lines = dict(line.split(" ", 1) for line in shown.stdout.splitlines())
    assert lines["Python"] == platform.python_version()
    assert lines["torch"] == version("torch")
    assert {"earl-rl", "prefect", "mlflow"} <= lines.keys()


def test_the_shell_completes_recipes_runs_and_checkpoints(fresh_earl: Earl) -> None:
    (fresh_earl.directory / "runs/mine/checkpoints/000007").mkdir(parents=True)
    (fresh_earl.directory / "runs/mine/config.yaml").write_text("name: mine\n")
    assert "tictactoe_tiny" in complete(fresh_earl, "earl train tictactoe")
    assert complete(fresh_earl, "earl resume ") == ["mine"]
    chosen = complete(fresh_earl, "earl evaluate mine --checkpoint ")
    assert chosen == ["last", "best", "initial", "7"]


def complete(earl: Earl, line: str) -> list[str]:
    """What bash is told for this line, whose last word is incomplete."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    shown = subprocess.run(
        earl.command(),
        cwd=earl.directory,
        env={**earl.environment, "_EARL_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return shown.stdout.split()


def test_wrong_usage_exits_with_2(fresh_earl: Earl) -> None:
    shown = fresh_earl.run("train")
    assert shown.returncode == 2
    assert "config" in shown.stderr


def test_only_commands_that_need_prefect_import_it() -> None:
    modules = (
        "app runs configurations plan doctor status shards playing training evaluating "
        "comparing bisecting flow_command errors"
    )
    code = "; ".join(f"import flows.cli.{name}" for name in modules.split())
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

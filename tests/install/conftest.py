"""A wheel of this tree in a fresh environment whose other packages are those of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared import memory_place

ROOT = Path(__file__).resolve().parents[2]

USERS_FILES = {
    "tasks.py": "raise SystemExit('the tasks.py of the user ran')\n",
    "random.py": "raise SystemExit('the random.py of the user ran')\n",
    "flows/__init__.py": "raise SystemExit('the flows of the user ran')\n",
    "my_game.py": (
        "from earl_core.environments.base import Environment\n"
        "from earl_core.environments.registry import create\n\n\n"
        "def Game(**options) -> Environment:\n    return create('tic_tac_toe', options)\n"
    ),
}
"""What people have in their working directories, Prefect's users above all."""


def python(*arguments: str | Path) -> None:
    """Run this interpreter, whatever PYTHONPATH says."""
    shown = subprocess.run(
        [sys.executable, *arguments], env=clean_environment(), capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr


def clean_environment() -> dict[str, str]:
    """Without the checkout, and without a Prefect or MLflow of the caller's."""
    gone = ("PREFECT_", "MLFLOW_TRACKING", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if not k.startswith(gone)}


@pytest.fixture(scope="session")
def installed_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment into which the wheel was installed, and nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    source, environment = place / "source", place / "environment"
    source.mkdir()
    for name in ("earl_core", "tasks", "flows"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    offline = ("--quiet", "--no-deps", "--no-index")
    python("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", place, source)
    python("-m", "venv", "--without-pip", environment)
    binaries = environment / "bin"
    wheel = next(place.glob("*.whl"))
    python("-m", "pip", "--python", binaries / "python", "install", *offline, wheel)
    packages = next(environment.glob("lib/*/site-packages"))
    # A folder named in a .pth file is searched; the .pth files in it are not read.
    (packages / "of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return binaries


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with files of our packages' names."""
    for name, text in USERS_FILES.items():
        file = tmp_path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "work"


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    directory = memory_place("install")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)

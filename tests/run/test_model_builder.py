"""Runs that build the same model at once: one builds it, the others find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.models.builder import ModelBuilder
from earl_core.system.errors import ConfigError
from tests.run.test_run_directory import config_in

BUILDER = """
import time
def build(path, **options):
    path.mkdir()
    time.sleep(0.5)
    (path / "config.json").touch()
    with (path.parent / "built").open("a") as note:
        note.write("x")
"""

BUILD = """
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from earl_core.models.builder import ModelBuilder
from tests.run.test_run_directory import config_in
path = Path("model").absolute()
config = config_in(path.parent).model_dump(mode="json")
config["model"] = {"path": str(path), "builder": "shared:build"}
builder = ModelBuilder(None, {"stage": "rollout"}, config=config, run_directory="run")
builder.build()
"""


def test_runs_that_start_together_build_a_model_once(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(BUILDER)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    started = [
        subprocess.Popen([sys.executable, "-c", BUILD], cwd=tmp_path, env=environment)
        for _ in range(3)
    ]
    assert [process.wait(300) for process in started] == [0, 0, 0]
    assert (tmp_path / "built").read_text() == "x"


def test_options_that_the_builder_does_not_take_are_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path).model_dump(mode="json")
    config["model"] = {
        "path": str(tmp_path / "model"),
        "builder": "earl_core.models.tiny:build",
        "builder_options": {"environment": {"name": "tic_tac_toe"}},
    }
    context: Any = SimpleNamespace(report=lambda progress: None)
    builder = ModelBuilder(context, {"stage": "rollout"}, config=config, run_directory="run")
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'environment'.*characters"):
        builder.build()
    assert not (tmp_path / "model").exists()

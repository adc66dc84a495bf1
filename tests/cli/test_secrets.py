"""The command line shows and stores no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.config.test_secrets import RUN

SECRET = "sesame, open up"


def earl(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOOR_PASSWORD": SECRET, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_secret_on_the_command_line_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    before = sorted(tmp_path.rglob("*"))
    done = earl(tmp_path, "train", str(file), "--set", "environment.options.api_key=swordfish")
    assert done.returncode == 2
    assert "environment.options.api_key=env:NAME" in done.stderr
    assert "swordfish" not in done.stdout + done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_printed_holds_no_secret_of_the_environment(tmp_path: Path) -> None:
    done = earl(tmp_path, "train", f"no such file as {SECRET}.yaml")
    assert done.returncode == 2
    assert "(hidden)" in done.stderr
    assert SECRET not in done.stdout + done.stderr

"""Virtual environments with packages that cannot be installed beside ours."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

_INSTALL = Path(__file__).parents[1] / "requirements" / "install.py"
_NO_ANSWER = re.compile(r"Failed to fetch|error sending request|Request failed")


def package_sources() -> dict[str, str]:
    """This machine's package sources, as uv's environment variables."""
    install = runpy.run_path(str(_INSTALL))
    return {**os.environ, **install["sources"](install["_pip_configuration"]())}


def foreign_python(home: Path, *requirements: str) -> str:
    """An interpreter of this version with these packages; skips when the index is silent."""
    uv = (sys.executable, "-m", "uv")
    python = home / "bin" / "python"
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, home], check=True)
    done = subprocess.run(
        [*uv, "pip", "install", "--quiet", "--no-config", "--python", python, *requirements],
        env=package_sources(),
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode and _NO_ANSWER.search(done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return str(python)

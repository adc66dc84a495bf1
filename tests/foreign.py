"""Virtual environments with packages that cannot be installed beside ours."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.system.files import FileLock

CACHE = "EARL_TEST_CACHE"
"""Variable that names the folder of environments that outlive a session of tests."""

_INSTALL = Path(__file__).parents[1] / "requirements" / "install.py"
_NO_ANSWER = re.compile(r"Failed to fetch|error sending request|Request failed")
_UV = (sys.executable, "-m", "uv")
_LOCK_SECONDS = 600.0


def package_sources() -> dict[str, str]:
    """This machine's package sources, as uv's environment variables."""
    install = runpy.run_path(str(_INSTALL))
    return {**os.environ, **install["sources"](install["_pip_configuration"]())}


def foreign_python(home: Path, *requirements: str) -> str:
    """An interpreter of this version with these packages; skips when the index is silent."""
    subprocess.run([*_UV, "venv", "--quiet", "--python", sys.executable, home], check=True)
    python = home / "bin" / "python"
    _uv("pip", "install", "--python", str(python), *requirements)
    return str(python)


def newest_python(*requirements: str) -> tuple[str, str]:
    """An interpreter with the newest packages of the index, and the version of the first of them.

    It is kept between sessions, by the lock that the index makes of the requirements today. Skips
    when the index is silent.
    """
    lock = _uv("pip", "compile", "-", "--no-header", "--no-annotate", given="\n".join(requirements))
    package = re.split(r"[\[=<>]", requirements[0])[0]
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock, re.MULTILINE)
    assert found is not None, lock
    digest = hashlib.sha256(f"{sys.version}\n{lock}".encode()).hexdigest()[:16]
    home = _cache() / f"{package}-{found[1]}-{digest}"
    with FileLock(home.with_name(f"{home.name}.lock"), _LOCK_SECONDS):
        if not home.exists():
            _make(home, lock)
    return str(home / "bin" / "python"), found[1]


def _make(home: Path, lock: str) -> None:
    """A whole environment or none: what was begun is elsewhere until it is renamed."""
    begun = home.with_name(f"{home.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    venv = ["venv", "--quiet", "--relocatable", "--python", sys.executable, str(begun)]
    subprocess.run([*_UV, *venv], check=True)
    (begun / "lock.txt").write_text(lock)
    python = str(begun / "bin" / "python")
    _uv("pip", "install", "--compile-bytecode", "--python", python, "-r", f"{begun}/lock.txt")
    begun.rename(home)


def _cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "earl-tests"
    place = Path(os.environ.get(CACHE) or default)
    place.mkdir(parents=True, exist_ok=True)
    return place


def _uv(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        [*_UV, *arguments, "--quiet", "--no-config"],
        env=package_sources(),
        input=given,
        capture_output=True,
        text=True,
    )
    if done.returncode and _NO_ANSWER.search(done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout

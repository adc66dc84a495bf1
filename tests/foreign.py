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

LOCKS = Path(__file__).parent / "frameworks" / "locks"
"""Files NAME.txt with all versions of what a test of the package NAME wants."""

_INSTALL = Path(__file__).parents[1] / "requirements" / "install.py"
_NO_ANSWER = re.compile(r"Failed to fetch|error sending request|Request failed")
_UV = (sys.executable, "-m", "uv")
_LOCK_SECONDS = 600.0
_BEGUN = ".begun"
_USES = "earl-uses.txt"
"""In an environment of the cache: a line for each of those who want it as it is."""


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


def locked_python(lock: Path) -> tuple[str, str]:
    """An interpreter with the versions of a lock NAME.txt, and that of the package NAME.

    It is kept between sessions; only to make it the index is asked. Skips when that is silent.
    """
    return _kept(lock.stem, lock.read_text(), lock.name)


def newest_python(*requirements: str) -> tuple[str, str]:
    """An interpreter with the newest packages of the index, and the version of the first of them.

    It is kept between sessions, by the lock that the index makes of the requirements today. When
    the index is silent, it is the last one that was made of them; skips where there is none.
    """
    package, use = re.split(r"[\[=<>]", requirements[0])[0], " ".join(requirements)
    given = "\n".join(requirements)
    try:
        lock = _uv("pip", "compile", "-", "--no-header", "--no-annotate", given=given)
        return _kept(package, lock, use)
    except pytest.skip.Exception:
        for home in _homes():
            if _use_line(use) in _uses(home):
                return _found(home)
        raise


def _kept(package: str, lock: str, use: str) -> tuple[str, str]:
    """The environment of a lock. Those that the same use had before are removed."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock, re.MULTILINE)
    assert found is not None, lock
    digest = hashlib.sha256(f"{sys.version}\n{lock}".encode()).hexdigest()[:16]
    home, line = _cache() / f"{package}-{found[1]}-{digest}", _use_line(use)
    with _locked(home):
        if not home.exists():
            _make(home, lock)
        uses = _uses(home)
        if line in uses:
            return _found(home)
        _write_uses(home, [*uses, line])
    for older in _homes():
        if older != home:
            _give_up(older, line)
    return _found(home)


def _give_up(home: Path, line: str) -> None:
    """One use less of an environment, which goes with its last one."""
    with _locked(home) as lock:
        uses = _uses(home)
        if line not in uses:
            return
        uses.remove(line)
        if uses:
            _write_uses(home, uses)
            return
        shutil.rmtree(_begun(home), ignore_errors=True)
        home.rename(_begun(home))
        shutil.rmtree(_begun(home))
        lock.path.unlink()


def _homes() -> list[Path]:
    """The environments that this cache has made, whole."""
    found = [record.parent for record in _cache().glob(f"*/{_USES}")]
    return [home for home in found if home.suffix != _BEGUN]


def _use_line(use: str) -> str:
    return f"{use} by {sys.version}".replace("\n", " ")


def _uses(home: Path) -> list[str]:
    record = home / _USES
    return record.read_text().splitlines() if record.exists() else []


def _write_uses(home: Path, uses: list[str]) -> None:
    (home / _USES).write_text("".join(f"{each}\n" for each in uses))


def _found(home: Path) -> tuple[str, str]:
    return str(home / "bin" / "python"), home.name.rsplit("-", 2)[1]


def _locked(home: Path) -> FileLock:
    return FileLock(home.with_name(f"{home.name}.lock"), _LOCK_SECONDS)


def _begun(home: Path) -> Path:
    return home.with_name(f"{home.name}{_BEGUN}")


def _make(home: Path, lock: str) -> None:
    """A whole environment or none: what was begun is elsewhere until it is renamed."""
    begun = _begun(home)
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

"""The tool `python` holds the code that it runs, as root and as another user, with and without
namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from earl_core.environments.hosting.pool import write_host_archive
from earl_core.environments.tools.python import python
from tests.environments import sandbox_attacks

OTHER_USER = 61234
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="earl-attacks-", dir="/tmp"))
    folder.chmod(0o755)
    write_host_archive(folder).chmod(0o644)
    shutil.copy(sandbox_attacks.__file__, folder / "attacks.py")
    yield folder
    shutil.rmtree(folder)


def attacked(place: Path, mode: str, other: bool) -> dict[str, object]:
    work = Path(tempfile.mkdtemp(dir=place))
    given: dict[str, int] = {}
    if other:
        if os.geteuid() or not Path(SYSTEM_PYTHON).exists():
            pytest.skip("only root becomes another user, who needs a Python to read")
        os.chown(work, OTHER_USER, OTHER_USER)
        given = {"user": OTHER_USER, "group": OTHER_USER}
    done = subprocess.run(
        [SYSTEM_PYTHON if other else sys.executable, place / "attacks.py",
         place / "environment_host.pyz", work, mode],
        cwd="/",
        env={"PATH": os.defpath, "OF_THE_TRAINER": "SESAME", "TMPDIR": str(work)},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **given,  # type: ignore[call-overload]
    )  # fmt: skip
    if "needs to cut" in done.stderr:
        pytest.skip(done.stderr[-300:])
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("mode", "other"),
    [
        ("namespaces", False),
        ("filters", True),
        pytest.param("namespaces", True, marks=pytest.mark.slow),
        pytest.param("filters", False, marks=pytest.mark.slow),
    ],
)
def test_attacks_are_held(place: Path, mode: str, other: bool) -> None:
    answers = attacked(place, mode, other)["answers"]
    assert isinstance(answers, dict)
    if mode == "namespaces" and not python.check():  # type: ignore[attr-defined]
        assert "No space left" in answers["disk"]
    del answers["disk"]
    assert not [name for name, said in answers.items() if "SESAME" in said]
    done = {name: said for name, said in answers.items() if "DONE" in said}
    # Its own variables, which are none of ours.
    assert done.keys() <= {"own variables", "all variables"}, done
    assert all("PATH=" in said for said in done.values())
    assert "over 3 s" in answers["stays"]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        assert b"98.76" not in process.read_bytes().split(b"\0")[-2:][0]
    left = [*Path("/sys/fs/cgroup").rglob(f"earl-python-{os.getpid()}-*")]
    assert left == [*place.rglob("earl-python-*")] == []
    assert answers["printed"].splitlines() == ['{"a": 1}', "2"]
    assert answers["folder"] == "['a'] True\n"
    assert answers["child"] == "5\n\n"
    assert answers["exit"] == "bye\n"
    assert answers["raised"].startswith('Traceback (most recent call last):\n  File "<code>"')

"""Each user has a directory in shared memory, and uses it only when nobody else can reach in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from earl_core.config.services import DispatchConfig
from earl_core.dispatch.segments.pool_directory import make_store
from earl_core.run import RunDirectory
from earl_core.run.run_stores import sweep
from earl_core.system import files as module
from earl_core.system.errors import NotOurs
from flows.cli.checks.shared_memory import check_shared_memory
from tests.run.test_run_directory import config_in, seal


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm/earl-<user id>."""
    monkeypatch.setattr(module, "user_directory", lambda: tmp_path / "shm")
    return tmp_path / "shm"


def test_two_users_have_two_directories() -> None:
    assert DispatchConfig().directory == f"/dev/shm/earl-{os.geteuid()}"


def test_a_file_system_without_folders_is_an_error_and_no_endless_try() -> None:
    with pytest.raises(FileNotFoundError):
        make_store(Path("/proc/store"))


def _open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def _of_another(path: Path) -> None:
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 65534, 65534)
    except PermissionError:
        pytest.skip("giving a directory away needs privileges")


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [(_open, "open to others"), (_of_another, "belongs to user 65534"), (_link, "is a link")],
)
def test_what_others_can_reach_is_refused(
    tmp_path: Path, ours: Path, make: Callable[[Path], None], words: str
) -> None:
    make(ours)
    with pytest.raises(NotOurs, match=words):
        RunDirectory.open(config_in(tmp_path))
    found = [f for f in check_shared_memory(config_in(tmp_path)) if f.level == "blocks"]
    assert len(found) == 1
    assert words in found[0].text
    # A folder that somebody chose may be as it is.
    elsewhere = config_in(tmp_path, name="b", dispatch={"directory": str(tmp_path / "chosen")})
    (tmp_path / "chosen").mkdir(mode=0o755)
    RunDirectory.open(elsewhere).close()


def test_it_is_made_private_and_goes_when_it_is_empty(tmp_path: Path, ours: Path) -> None:
    runs = [RunDirectory.open(config_in(tmp_path, name=name)) for name in ("a", "b")]
    for run in runs:
        seal(run, 0, "rollout", "key")
    assert {path.stat().st_mode & 0o777 for path in (ours, *ours.iterdir())} == {0o700}
    runs[0].finish()
    runs[0].close()
    assert [path.name for path in ours.iterdir()] == [runs[1].uid]
    runs[1].close()
    assert sweep(ours) == [runs[1].store.directory]
    assert not ours.exists()

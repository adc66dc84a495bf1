"""A run is one directory: copies are refused, live stores are left alone, a look locks nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from earl_core.config import ConfigError
from earl_core.run import RunDirectory
from earl_core.run.lock import RunLock, is_locked
from earl_core.run.run_stores import list_stores, sweep
from earl_core.system.errors import InUse
from earl_core.system.files import FileLock, is_held
from tests.run.test_run_directory import config_in, seal

COPY = "is a copy of the run in"


def test_a_copy_is_refused_and_the_original_keeps_its_shards(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = RunDirectory.open(config)
    manifest = seal(run, 0, "rollout", "key")
    run.close()
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    before = (tmp_path / "runs" / "b" / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=COPY) as refused:
        RunDirectory.open(config_in(tmp_path, name="b"))
    assert str(tmp_path / "runs" / "a") in str(refused.value)
    assert (tmp_path / "runs" / "b" / "run.json").read_bytes() == before
    again = RunDirectory.open(config)
    assert again.sealed(0, "rollout", "key") == manifest
    again.close()


def test_a_moved_run_goes_on_and_so_does_a_copy_without_an_original(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path))
    manifest = seal(run, 0, "rollout", "key")
    run.close()
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "renamed")
    renamed = RunDirectory.open(config_in(tmp_path, name="renamed"))
    assert renamed.sealed(0, "rollout", "key") == manifest
    renamed.close()
    # To another file system: a copy, and the original is removed.
    shutil.copytree(tmp_path / "runs" / "renamed", tmp_path / "elsewhere" / "a")
    shutil.rmtree(tmp_path / "runs" / "renamed")
    moved = RunDirectory.open(config_in(tmp_path, runs_directory=str(tmp_path / "elsewhere")))
    assert moved.sealed(0, "rollout", "key") == manifest
    # Through a link, and so by another path, it is the same directory.
    moved.close()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    linked = RunDirectory.open(config_in(tmp_path, runs_directory=str(tmp_path / "link")))
    assert linked.sealed(0, "rollout", "key") == manifest
    linked.close()


def test_a_copy_that_took_the_place_of_a_renamed_original_keeps_it_out(tmp_path: Path) -> None:
    RunDirectory.open(config_in(tmp_path)).close()
    runs = tmp_path / "runs"
    shutil.copytree(runs / "a", runs / "copy")
    (runs / "a").rename(runs / "renamed")
    RunDirectory.open(config_in(tmp_path, name="copy")).close()
    with pytest.raises(ConfigError, match=COPY):
        RunDirectory.open(config_in(tmp_path, name="renamed"))


_SWEEP = """
import sys
from pathlib import Path
from earl_core.config.services import DispatchConfig
from earl_core.run.run_stores import list_stores, sweep, sweep_unneeded
root = Path(sys.argv[1])
assert [state.live for state in list_stores(root)] == [True]
print(sweep(root), sweep_unneeded(root, DispatchConfig(retain_hours=0, retain_bytes=0)))
"""


def test_a_live_store_stays_where_its_run_directory_is_not_seen(tmp_path: Path) -> None:
    run = RunDirectory.open(config_in(tmp_path))
    manifest = seal(run, 0, "rollout", "key")
    runs = tmp_path / "runs"
    python = f'exec "{sys.executable}" -c "$SCRIPT" "{run.store.directory.parent}"'
    command = f'mount -t tmpfs tmpfs "{runs}" && {python}'
    elsewhere = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", command],
        env={**os.environ, "SCRIPT": _SWEEP},
        capture_output=True,
        text=True,
    )
    if "unshare" not in elsewhere.stderr and "mount:" not in elsewhere.stderr:
        assert elsewhere.stdout.split() == ["[]", "[]"], elsewhere.stderr
    runs.rename(tmp_path / "hidden")
    assert sweep(run.store.directory.parent) == []
    (tmp_path / "hidden").rename(runs)
    run.store.verify(manifest.shards[0], checksum=True)
    run.close()
    runs.rename(tmp_path / "hidden")
    assert sweep(run.store.directory.parent) == [run.store.directory]


_ONLOOKER = """
import sys
from pathlib import Path
from earl_core.system.files import is_held
from earl_core.run.lock import is_locked
from earl_core.run.run_stores import list_stores, sweep
run, root = Path(sys.argv[1]), Path(sys.argv[2])
looks = 0
print("looking", flush=True)
while True:
    for _ in range(50):
        is_locked(run)
    list(list_stores(root))
    sweep(root)
"""


def test_onlookers_and_sweepers_never_make_a_start_fail(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    RunDirectory.open(config).close()
    run, root = tmp_path / "runs" / "a", tmp_path / "shm"
    command = [sys.executable, "-c", _ONLOOKER, str(run), str(root)]
    onlooker = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert onlooker.stdout is not None
        onlooker.stdout.readline()
        for _ in range(1500):
            RunLock(run).release()
        for _ in range(20):
            opened = RunDirectory.open(config)
            entry = seal(opened, 0, "rollout", "key").shards[0]
            opened.store.verify(entry, checksum=False)
            opened.close()
        assert onlooker.poll() is None
    finally:
        onlooker.kill()
        onlooker.communicate()


def test_a_look_takes_nothing_and_what_cannot_be_looked_at_counts_as_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not is_held(Path("/dev/null/run/lock"))
    lock = FileLock(path)
    assert is_held(path)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    lock.release()
    assert not is_held(path)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    assert is_held(path)
    with pytest.raises(OSError, match="symbolic"):
        FileLock(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_lies_in_the_place_of_a_lock_is_one_sentence(tmp_path: Path, make: object) -> None:
    config = config_in(tmp_path)
    RunDirectory.open(config).close()
    lock = tmp_path / "runs" / "a" / "lock"
    lock.unlink()
    make(lock)  # type: ignore[operator]
    with pytest.raises((ConfigError, InUse), match="cannot be locked"):
        RunDirectory.open(config)


def test_a_lock_goes_with_a_killed_process_also_in_a_store(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    script = (
        "import os, sys; from earl_core.config import load_config\n"
        "from earl_core.run import RunDirectory\n"
        "run = RunDirectory.open(load_config(sys.argv[1])); os.kill(os.getpid(), 9)\n"
    )
    RunDirectory.open(config).close()
    stored = tmp_path / "runs" / "a" / "config.yaml"
    subprocess.run([sys.executable, "-c", script, str(stored)], check=False)
    assert not is_locked(tmp_path / "runs" / "a")
    assert [state.live for state in list_stores(tmp_path / "shm")] == [False]
    RunDirectory.open(config).close()

"""The folder of an episode: made, filled, and removed with all that the episode left in it.

A lock that its process holds marks it, so that what a killed process left is found and removed, and
nothing else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from earl_core.environments.task_directories.dockerfile import Image
from earl_core.environments.task_directories.task import Task
from earl_core.environments.tools.sandbox import view
from earl_core.system.errors import NotOurs

logger = logging.getLogger(__name__)

_ROUNDS, _PAUSE_SECONDS = 40, 0.05
_REWARD_BYTES = 1 << 16
_OWN = ("/tmp", "/var/tmp", "/logs/agent", "/logs/verifier", "/run")
_EMPTY = ("/proc", "/dev")
_AWAY = (*_EMPTY, "/tests", "/solution")
_OF_RUN = ("/run/systemd/resolve", "/run/current-system")
"""What else of `/run` programs need: names of hosts, and the programs of NixOS. Sockets of services
are there, too."""


class Stopped(Exception):
    """Nobody waits for the copy any more."""


def base() -> Path:
    """The folder of this user's folders, which no episode sees."""
    return Path(os.path.realpath(tempfile.gettempdir())) / f"earl-tasks-{os.geteuid()}"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder of this process's, which is removed at the end. Raises `NotOurs` where another
    user has made the folder that it lies in."""
    while True:
        try:
            base().mkdir(mode=0o700, exist_ok=True)
            _check_ours(base())
            folder = Path(tempfile.mkdtemp(dir=base()))
        except FileNotFoundError:  # the last other one has just gone
            continue
        held = _lock(folder)
        # A sweep may have come between.
        if held is not None and folder.exists():
            break
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(held)
        with suppress(OSError):
            base().rmdir()


def sweep() -> None:
    """Remove the folders of processes that are no more."""
    with suppress(FileNotFoundError):
        _check_ours(base())
        for folder in base().iterdir():
            held = _lock(folder)
            if held is not None:
                _remove(folder)
                os.close(held)
        with suppress(OSError):
            base().rmdir()


def _check_ours(folder: Path) -> None:
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise NotOurs(f"{folder} is not this user's alone", remedy="remove it, or set TMPDIR")


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock, None where another process has it, or the folder went."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path) -> None:
    """Remove a folder, also what nobody may enter. Files of other mounts are never reached."""
    for _ in range(_ROUNDS):
        if not view.mounts_below(os.path.realpath(folder)):
            shutil.rmtree(folder, onerror=_open_up)
            if not os.path.lexists(folder):
                return
        time.sleep(_PAUSE_SECONDS)
    logger.warning("%s cannot be removed", folder)


def _open_up(_: Any, path: str, error: Any) -> None:
    if isinstance(error[1], PermissionError):
        for each in (os.path.dirname(path), path):
            with suppress(OSError):
                if stat.S_ISDIR(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)


def own_paths(task: Task, image: Image) -> list[str]:
    """The folders of a task that hide what the host has there."""
    folders = [*_OWN, *image.made, task.workdir or image.workdir]
    folders += [path for source, path in image.copies if source.is_dir()]
    return sorted({_real(each) for each in folders if each != "/"})


def _real(path: str) -> str:
    """The path without a link of the host at its beginning, such as `/bin`."""
    first = "/" + path[1:].partition("/")[0]
    return os.path.realpath(first) + path[len(first) :] if os.path.islink(first) else path


def fill(root: Path, task: Task, image: Image, stop: threading.Event) -> None:
    """Make the task's folders and copy what its image copies. Raises OSError and `Stopped`."""
    for path in own_paths(task, image):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
    for path in ("tmp", "var/tmp"):
        (root / path).chmod(0o1777)
    (root / "tmp" / "home").mkdir()
    for source, path in image.copies:
        target = root / _real(path)[1:]
        if source.is_dir() and not source.is_symlink():
            _copy_folder(source, target, task.outside if source == task.context else (), stop)
        else:
            if target.is_dir():
                target /= source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _copy_folder(source: Path, target: Path, outside: Sequence[str], stop: threading.Event) -> None:
    def one(file: str, to: str) -> Any:
        if stop.is_set():
            raise Stopped
        return shutil.copy2(file, to, follow_symlinks=False)

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) == source and name in outside]

    shutil.copytree(
        source, target, symlinks=True, ignore=left_out, copy_function=one, dirs_exist_ok=True
    )


def lay(root: Path, own: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Make the places of the host's files in a root, beside what it has; returns the paths.

    own: folders that hide what the host has. shown: paths of the host that are there although one
    of those hides them.
    """
    binds: list[str] = []

    def bind(path: str) -> None:
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(path):
            place.mkdir(exist_ok=True)
        else:
            place.touch()
        binds.append(path)

    def visit(folder: str) -> None:
        with suppress(PermissionError):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                place, path = Path(f"{root}{entry.path}"), entry.path
                if path in _AWAY or path in own:
                    continue
                if not os.path.lexists(place):
                    if entry.is_symlink():
                        place.symlink_to(os.readlink(path))
                    elif entry.is_dir() or entry.is_file():
                        bind(path)
                elif entry.is_dir(follow_symlinks=False) and place.is_dir():
                    visit(path)

    visit("/")
    for path in _EMPTY:
        Path(f"{root}{path}").mkdir(exist_ok=True)
    for path in [*_OF_RUN, *shown]:
        hidden = any(path.startswith(f"{each}/") for each in own)
        if hidden and os.path.exists(path) and not any(path.startswith(f"{b}/") for b in binds):
            bind(path)
    return binds


def add_tests(root: Path, task: Task) -> None:
    """Put the tests where they run, in place of whatever the agent has left there."""
    for path in ("tests", "logs/verifier"):
        parent = root / os.path.dirname(path)
        if parent.is_symlink() or not parent.is_dir():
            _clear(parent)
            parent.mkdir()
        _clear(root / path)
    (root / "logs" / "verifier").mkdir(mode=0o777)
    if task.tests.is_dir():
        shutil.copytree(task.tests, root / "tests", symlinks=True)
    else:
        (root / "tests").mkdir()
    script = root / "tests" / task.test.name
    if not script.exists():
        shutil.copy2(task.test, script)
    script.chmod(script.stat().st_mode | 0o111)


def _clear(path: Path) -> None:
    if os.path.lexists(path):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        else:
            path.unlink()


def read_reward(root: Path, name: str) -> str | None:
    """A reward file's text, None where there is none; no link is followed, and nothing waited for.
    Raises OSError for what is no regular file."""
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in ("logs", "verifier"):
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=held)
    except FileNotFoundError:
        return None
    finally:
        os.close(held)
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is no regular file")
        return stream.read(_REWARD_BYTES).decode("utf-8", "replace")

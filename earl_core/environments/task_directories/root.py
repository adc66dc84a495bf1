"""The root of an episode: the task's files and places of the host's.

All of it happens outside of the episode's space, where links of the task and of its agent lead to
the host's files: none is followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from earl_core.environments.task_directories.dockerfile import Image
from earl_core.environments.task_directories.scratch import remove
from earl_core.environments.task_directories.task import Task
from earl_core.system.errors import ConfigError

HOME = "/tmp/home"
_REWARD_BYTES = 1 << 16
_OWN = (HOME, "/tmp", "/var/tmp", "/logs/agent", "/logs/verifier", "/run")
_EMPTY = ("/proc", "/dev")
_AWAY = (*_EMPTY, "/tests", "/solution")
_OF_RUN = ("/run/systemd/resolve", "/run/current-system")
"""What else of `/run` programs need: names of hosts, and the programs of NixOS. Sockets of services
are there, too."""


class Stopped(Exception):
    """Nobody waits for the copy any more."""


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
    """Make the task's folders and copy what its image copies. Raises OSError, `Stopped`, and
    `ConfigError` for a copy that would leave the root by a link of the task's."""
    for path in own_paths(task, image):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
    for path in ("tmp", "var/tmp"):
        (root / path).chmod(0o1777)
    for source, path in image.copies:
        target = root / _real(path)[1:]
        if _is_folder(source):
            _copy_folder(root, source, target, task.outside if source == task.context else (), stop)
        else:
            _check_inside(root, target)
            if target.is_dir():
                target /= source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(str(source), str(target))


def _check_inside(root: Path, target: Path) -> None:
    """Raise `ConfigError` where links lead from the target's place, or the target, elsewhere."""
    real = Path(os.path.realpath(target if target.is_dir() else target.parent))
    if not real.is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            f"the task copies to /{target.relative_to(root)} through a link to {real}",
            remedy="have its Dockerfile copy to a folder that is no link",
        )


def _copy(file: str, to: str) -> str:
    if os.path.islink(to):
        # It would be written through.
        os.unlink(to)
    elif os.path.isdir(to):
        # shutil would go into it, and through a link there.
        raise IsADirectoryError(errno.EISDIR, "a file is copied to what is a folder", to)
    shutil.copy2(file, to, follow_symlinks=False)
    return to


def _copy_folder(
    root: Path, source: Path, target: Path, outside: Sequence[str], stop: threading.Event
) -> None:
    def one(file: str, to: str) -> Any:
        if stop.is_set():
            raise Stopped
        return _copy(file, to)

    def left_out(folder: str, names: list[str]) -> list[str]:
        # Called before anything is written for this folder.
        inside = target / Path(folder).relative_to(source)
        _check_inside(root, inside)
        left = [name for name in names if Path(folder) == source and name in outside]
        for name in set(names) - set(left):
            if os.path.islink(Path(folder, name)) and not _is_folder(inside / name):
                (inside / name).unlink(missing_ok=True)
        return left

    shutil.copytree(
        source, target, symlinks=True, ignore=left_out, copy_function=one, dirs_exist_ok=True
    )


def lay(root: Path, own: Sequence[str], shown: Sequence[str]) -> dict[str, str]:
    """Make the places of the host's files in a root, beside what it has. Returns them: what a link
    leads to, "" where the host's file or folder is to be shown.

    own: folders that hide what the host has. shown: paths of the host that are there although one
    of those hides them.
    """
    laid: dict[str, str] = {}

    def visit(folder: str) -> None:
        with suppress(PermissionError):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                place, path = Path(f"{root}{entry.path}"), entry.path
                if path in _AWAY or path in own:
                    continue
                if not os.path.lexists(place):
                    if entry.is_symlink():
                        laid[path] = os.readlink(path)
                    elif entry.is_dir() or entry.is_file():
                        laid[path] = ""
                elif entry.is_dir(follow_symlinks=False) and _is_folder(place):
                    visit(path)

    visit("/")
    for path in [*_OF_RUN, *shown]:
        hidden = any(path.startswith(f"{each}/") for each in own)
        above = (each for each, link in laid.items() if not link)
        if hidden and os.path.exists(path) and not any(path.startswith(f"{b}/") for b in above):
            laid[path] = ""
    restore(root, own, laid)
    return laid


def restore(root: Path, own: Iterable[str], laid: Mapping[str, str]) -> None:
    """Have the places in a root, and the task's folders, be there, whatever its agent has put in
    their place: programs of the host are found by them."""
    root.chmod(0o755)
    for path in [*_EMPTY, *own]:
        _make_folder(root, path)
    for path, target in laid.items():
        place = Path(f"{root}{path}")
        _make_folder(root, os.path.dirname(path))
        if target:
            if not (place.is_symlink() and os.readlink(place) == target):
                _clear(place)
                place.symlink_to(target)
        elif os.path.isdir(path):
            _make_folder(root, path)
        elif not (os.path.lexists(place) and stat.S_ISREG(os.lstat(place).st_mode)):
            _clear(place)
            place.touch()


def _make_folder(root: Path, path: str) -> None:
    """Make a folder and those above it, which all can be entered then."""
    place = root
    for part in PurePosixPath(path).parts[1:]:
        place /= part
        mode = os.lstat(place).st_mode if os.path.lexists(place) else 0
        if not stat.S_ISDIR(mode):
            _clear(place)
            place.mkdir()
        elif mode & stat.S_IRWXU != stat.S_IRWXU:
            place.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def add_tests(root: Path, task: Task) -> None:
    """Put the tests where they run, in place of whatever the agent has left there. The places are
    restored."""
    for path in ("tests", "logs/verifier"):
        _clear(root / path)
    (root / "logs" / "verifier").mkdir(mode=0o777)
    if task.tests.is_dir():
        shutil.copytree(task.tests, root / "tests", symlinks=True)
    else:
        (root / "tests").mkdir()
    script = root / "tests" / task.test.name
    if script.is_symlink() or not script.exists():
        _clear(script)
        shutil.copy2(task.test, script)
    script.chmod(script.stat().st_mode | 0o111)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _clear(path: Path) -> None:
    if _is_folder(path):
        remove(path)
    else:
        path.unlink(missing_ok=True)


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

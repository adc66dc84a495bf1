"""A task in a copy of its files, on this host: paths are the task's, programs are the host's."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from earl_core.environments.adapters.run_program import Ended, run_program
from earl_core.environments.task_directories.dockerfile import Image, read_image
from earl_core.environments.task_directories.hidden import hidden_paths
from earl_core.environments.task_directories.root import (
    HOME,
    add_tests,
    fill,
    lay,
    own_paths,
    read_reward,
    restore,
)
from earl_core.environments.task_directories.scratch import base, scratch
from earl_core.environments.task_directories.space import Space
from earl_core.environments.task_directories.task import Task
from earl_core.system.errors import ConfigError

TASK = "/tmp/earl-task.json"
_PASSED = (
    "PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "PYTHONPATH", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY",
)  # fmt: skip
"""Variables of the host that its programs need; the others may hold its secrets."""


class SubprocessRuntime:
    """path: the folder of the tasks. command: what will run. variables: of it; files that they
    name are there. skip: whether the host already has what RUN instructions install. Raises
    ConfigError for a task that cannot be played so."""

    def __init__(
        self,
        tasks: Sequence[Task],
        path: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
        skip: bool,
    ) -> None:
        self._images = {task.directory: _image(task, skip) for task in tasks}
        self.command = [_absolute(each) for each in command]
        passed = [os.environ[name] for name in _PASSED if name in os.environ]
        needed = _needed(self.command, [*passed, *variables.values()])
        self._shown = [
            each for each in needed if not any(each.startswith(f"{above}/") for above in needed)
        ]
        self._hidden = [str(base()), *hidden_paths(path, needed)]
        for task in tasks:
            if over := sorted(set(self._own(task)) & set(self._shown)):
                raise ConfigError(
                    f"the task {task.name!r} has {over[0]} for itself, which holds the agent or "
                    "its Python here",
                    remedy="begin the run in another folder, or use runtime: docker",
                )

    def probe(self, task: Task) -> None:
        """Make the space of a task without its files, and run nothing there. Raises ConfigError."""
        with scratch() as folder:
            root = folder / "root"
            root.mkdir()
            empty = replace(self._images[task.directory], copies=[])
            fill(root, task, empty, threading.Event())
            space = Space(str(root), _binds(self._lay(root, task)), self._hidden, None)
            ended = subprocess.run(
                space.command(), env=self._variables(task), capture_output=True, check=False
            )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip()[-300:]
            raise ConfigError(
                f"task directories cannot be played by the runtime subprocess here ({said})",
                remedy="allow user namespaces, or use runtime: docker",
            )

    @asynccontextmanager
    async def place(self, task: Task) -> AsyncIterator[Place]:
        """Give the place of one episode, which goes afterwards."""
        made, stop = scratch(), threading.Event()
        root = made.__enter__() / "root"
        root.mkdir()
        filling = asyncio.ensure_future(
            asyncio.to_thread(fill, root, task, self._images[task.directory], stop)
        )
        try:
            await asyncio.shield(filling)
            laid, variables = self._lay(root, task), self._variables(task)
            space = Space(str(root), _binds(laid), self._hidden, self.workdir(task))
            yield Place(task, root, space, self._own(task), laid, variables)
        finally:
            stop.set()
            await asyncio.wait({filling})
            # A large one takes long, and other episodes go on.
            await asyncio.shield(asyncio.to_thread(made.__exit__, None, None, None))

    def workdir(self, task: Task) -> str:
        """The folder that a task's commands run in."""
        return task.workdir or self._images[task.directory].workdir

    def _own(self, task: Task) -> list[str]:
        return own_paths(task, self._images[task.directory])

    def _lay(self, root: Path, task: Task) -> dict[str, str]:
        return lay(root, self._own(task), self._shown)

    def _variables(self, task: Task) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        own = self._images[task.directory].variables
        return {**passed, "HOME": HOME, **own, **task.variables}


class Place:
    """Where one episode's commands run."""

    def __init__(
        self,
        task: Task,
        root: Path,
        space: Space,
        own: Sequence[str],
        laid: Mapping[str, str],
        variables: Mapping[str, str],
    ) -> None:
        self._task, self._root, self._space = task, root, space
        self._own, self._laid, self._variables = own, laid, variables

    async def put(self, text: str) -> None:
        """Write what the agent is told to the file `TASK`."""
        (self._root / TASK[1:]).write_text(text)

    async def run(self, command: Sequence[str], given: str, variables: Mapping[str, str]) -> Ended:
        """Run a command; all that it began ends with it."""
        every = {**self._variables, **variables}
        return await run_program(self._space.command(*command), given, every, True)

    async def add_tests(self) -> None:
        """Show the tests, and the host's programs as they were. Raises OSError."""
        await asyncio.to_thread(restore, self._root, self._own, self._laid)
        await asyncio.to_thread(add_tests, self._root, self._task)

    async def reward(self, name: str) -> str | None:
        """Return what a file of the tests' holds. Raises OSError for what is no file."""
        return await asyncio.to_thread(read_reward, self._root, name)


def _binds(laid: Mapping[str, str]) -> list[str]:
    return [path for path, link in laid.items() if not link]


def _image(task: Task, skip: bool) -> Image:
    if task.context is None or (task.image and not (task.context / "Dockerfile").is_file()):
        raise ConfigError(
            f"the task {task.name!r} needs the image {task.image!r}, which the runtime subprocess "
            "does not have",
            remedy="use runtime: docker, or leave the task out",
        )
    if (task.context / ".dockerignore").is_file():
        raise ConfigError(
            f"the task {task.name!r} has a .dockerignore, which the runtime subprocess does not do",
            remedy="remove it, and what it names, or use runtime: docker",
        )
    image = read_image(task.context, os.environ.get("PATH"))
    if image.commands and not skip:
        raise ConfigError(
            f"the Dockerfile of the task {task.name!r} runs {image.commands[0][:80]!r}, which the "
            "runtime subprocess does not do",
            remedy="use runtime: docker, or, where this host has what such commands install, set "
            "the option run_instructions to skip",
        )
    for source, _ in image.copies:
        if source.relative_to(task.context).parts[:1] in [(each,) for each in task.outside]:
            raise ConfigError(
                f"the Dockerfile of the task {task.name!r} copies {source.name!r}, which its agent "
                "must not see",
                remedy="leave the task out",
            )
    return image


def _absolute(word: str) -> str:
    """A word that is a file of the folder where the run began, as a path that holds anywhere."""
    return os.path.abspath(word) if os.path.isfile(word) else word


def _needed(command: Sequence[str], values: Sequence[str]) -> list[str]:
    """Paths of the host that the agent needs. values: of variables, which may name a file, such as
    that of certificates."""
    wanted = {os.getcwd(), sys.prefix, sys.base_prefix}
    wanted |= {
        word for word in [*command, *values] if word.startswith("/") and os.path.isfile(word)
    }
    if program := shutil.which(command[0]):
        wanted.add(program)
    wanted |= {os.path.realpath(each) for each in wanted}
    return sorted(wanted - {"/"})

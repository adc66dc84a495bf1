"""Task directories as an agent's environment: a program of the user's solves a task, its tests say
how well.

Standard library only, because hosts run under Pythons that have nothing else of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from earl_core.environments.adapters.run_program import Ended, policy_variables
from earl_core.environments.agent import episode_result
from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.options import Options
from earl_core.environments.shared_world import SharedWorld
from earl_core.environments.task_directories.docker_runtime import Container, DockerRuntime
from earl_core.environments.task_directories.scratch import sweep
from earl_core.environments.task_directories.subprocess_runtime import (
    TASK,
    Place,
    SubprocessRuntime,
)
from earl_core.environments.task_directories.task import FORMS, Task, read_task
from earl_core.environments.tools.sandbox.program import REFUSED
from earl_core.system.errors import ConfigError

logger = logging.getLogger(__name__)

_OUTCOMES = ("passed", "partly", "failed", "tests_timed_out", "tests_broken")
_NOT_FOUND = 127
_SIGNALLED = 128
_REWARD, _REWARDS = "reward.txt", "reward.json"


class TaskDirectoryOptions(Options):
    """Options of an agent that solves task directories.

    path: the folder of task directories, or one of them.
    command: program and arguments that solve a task, started for each episode.
    only: names of tasks, or patterns such as "easy-*"; the others are left out. None: all.
    leave_out: names or patterns of tasks that are left out.
    runtime: where it runs. subprocess: on this host, in a copy of the task's files. docker: in a
        container of the task's image.
    run_instructions: what the runtime subprocess does about a Dockerfile's RUN: refuse, or skip
        where the host has what they install.
    timeout_multiplier: factor of the time limits that tasks have.
    variables: further variables of the command.
    pass_variables: names of variables of the host that tasks may ask for, as ${NAME} in task.toml.
    network: docker's network of containers.
    mounts: folders of the host that containers read, HOST:CONTAINER.
    """

    path: str
    command: tuple[str, ...]
    only: tuple[str, ...] | None = None
    leave_out: tuple[str, ...] = ()
    runtime: Literal["subprocess", "docker"] = "subprocess"
    run_instructions: Literal["refuse", "skip"] = "refuse"
    timeout_multiplier: float = 1.0
    variables: dict[str, str] | None = None
    pass_variables: tuple[str, ...] = ()
    network: str = "bridge"
    mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command is empty: name the program that solves a task")
        if self.runtime == "subprocess" and shutil.which(self.command[0]) is None:
            raise ValueError(f"command names no program {self.command[0]!r}: correct it")
        if self.runtime == "subprocess" and (self.mounts or self.network != "bridge"):
            raise ValueError("network and mounts are for the runtime docker: leave them out")
        if self.timeout_multiplier <= 0:
            raise ValueError("timeout_multiplier is not above 0: give a positive number")


class TaskDirectories:
    """One episode: prompt number i has task i modulo their count, in the order of their names."""

    options_model: ClassVar[type[TaskDirectoryOptions]] = TaskDirectoryOptions
    wants_policy: ClassVar[bool] = True
    policy: Mapping[str, str]

    def __init__(self, options: TaskDirectoryOptions) -> None:
        self._options = options
        self._world = _World.of(options)
        self.longest_seconds = self._world.longest_seconds
        """The longest that an episode may take by the tasks' own limits."""
        self.prompt_count = len(self._world.tasks)

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Take the task; the message says nothing."""
        tasks = self._world.tasks
        self._task, self._index, self._seed = tasks[prompt % len(tasks)], prompt, seed
        return [{"role": "user", "content": "begin"}]

    async def step(self, text: str) -> StepResult:
        """Run the agent, then the tests; the text says nothing. Raises `EnvironmentFailed`."""
        runtime, task = self._world.runtime, self._task
        given = {
            "index": self._index, "seed": self._seed, "task": task.name,
            "instruction": task.instruction, "directory": runtime.workdir(task),
        }  # fmt: skip
        said = json.dumps(given, ensure_ascii=False)
        variables = {
            **policy_variables(self.policy),
            "EARL_TASK": TASK,
            "EARL_DIRECTORY": runtime.workdir(task),
            **(self._options.variables or {}),
        }
        began = time.monotonic()
        try:
            async with runtime.place(task) as place:
                await place.put(said)
                limit = self._limit(task.agent_seconds)
                ended = await _within(limit, place.run(runtime.command, said, variables))
                # A signal may have been sent by what the policy has said.
                if ended is not None and ended.code and ended.code <= _SIGNALLED:
                    raise _failure(task, f"the agent ended with {ended}")
                began = time.monotonic()
                verdict = await self._tested(place, task)
        except _TestsBroken as broken:
            if not await self._sound(task, time.monotonic() - began):
                raise _failure(task, str(broken)) from None
            logger.info("the task %r: its agent has broken its tests: %s", task.name, broken)
            verdict = {"reward": 0.0, "outcome": "tests_broken", "metrics": {}}
        verdict["metrics"]["agent_timed_out"] = float(ended is None)
        return episode_result({**verdict, "outcomes": list(_OUTCOMES), "task": task.name})

    def close(self) -> None:
        """Close nothing: a step ends with all that it began."""

    def _limit(self, seconds: float | None) -> float | None:
        return None if seconds is None else seconds * self._options.timeout_multiplier

    async def _sound(self, task: Task, spent: float) -> bool:
        """Whether the tests of a task give a reward where no agent has been. spent: seconds of the
        tests' time that are gone. Raises `EnvironmentFailed`."""
        known = self._world.sound
        if task.directory not in known:
            try:
                async with asyncio.timeout((self._limit(task.test_seconds) or 0.0) - spent):
                    async with self._world.runtime.place(task) as place:
                        await self._tested(place, task)
                known[task.directory] = True
            except _TestsBroken:
                known[task.directory] = False
            except TimeoutError:
                return True
        return known[task.directory]

    async def _tested(self, place: Place | Container, task: Task) -> dict[str, Any]:
        """The verdict of the tests. Raises `_TestsBroken`."""
        script = f"/tests/{task.test.name}"
        command = [script] if task.rewards else ["bash", script]
        try:
            await place.add_tests()
            began = time.monotonic()
            running = place.run(command, "", task.test_variables)
            ended = await _within(self._limit(task.test_seconds), running)
            metrics = {"tests_seconds": time.monotonic() - began}
            if ended is None:
                return {"reward": 0.0, "outcome": "tests_timed_out", "metrics": metrics}
            reward, further = await _reward(place, task, ended)
        except (OSError, EnvironmentFailed) as error:
            raise _TestsBroken(f"the tests could not be run: {error}") from error
        outcome = "passed" if reward >= 1 else "partly" if reward > 0 else "failed"
        return {"reward": reward, "outcome": outcome, "metrics": metrics | further}


class _TestsBroken(Exception):
    """The tests gave no reward, which may be their fault, or their agent's."""


class _World(SharedWorld):
    """The tasks of some options and their runtime, one for all episodes of a process."""

    def __init__(self, options: TaskDirectoryOptions) -> None:
        path = Path(options.path)
        self.tasks = read_tasks(path, options.only, options.leave_out, options.pass_variables)
        self.sound: dict[Path, bool] = {}
        """Whether a task's tests give a reward where no agent has been, once it was tried."""
        self.runtime: SubprocessRuntime | DockerRuntime
        variables = options.variables or {}
        if options.runtime == "docker":
            self.runtime = DockerRuntime(
                self.tasks, options.command, variables, options.network, options.mounts
            )
        else:
            skip = options.run_instructions == "skip"
            self.runtime = SubprocessRuntime(self.tasks, path, options.command, variables, skip)
            sweep()
        self.runtime.probe(self.tasks[0])
        limits = [(each.agent_seconds or 0.0) + each.test_seconds for each in self.tasks]
        self.longest_seconds = max(limits) * options.timeout_multiplier


def read_tasks(
    path: Path,
    only: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> list[Task]:
    """Read a folder of task directories, in the order of their names. passed: variables of this
    process that they may ask for. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"the folder of tasks {str(path)!r} does not exist", remedy="correct it")
    single = any((path / form).exists() for form in FORMS)
    folders = [path.absolute()] if single else sorted(path.absolute().iterdir())
    found = []
    for folder in folders:
        chosen = only is None or any(fnmatchcase(folder.name, each) for each in only)
        if not chosen or any(fnmatchcase(folder.name, each) for each in leave_out):
            continue
        if any((folder / form).exists() for form in FORMS):
            found.append(read_task(folder, passed))
        elif (folder / "instruction.md").exists() or (folder / "tests").exists():
            raise ConfigError(
                f"the task directory {str(folder)!r} has neither {' nor '.join(FORMS)}",
                remedy="add one, or leave the task out",
            )
    if not found:
        raise ConfigError(
            f"{str(path)!r} has no task directory that is played",
            remedy=f"name a folder whose folders have {' or '.join(FORMS)}, and correct only and "
            "leave_out",
        )
    return found


async def _within(seconds: float | None, running: Any) -> Ended | None:
    """What a program ended with, None where its time ended it."""
    try:
        async with asyncio.timeout(seconds):
            ended: Ended = await running
            return ended
    except TimeoutError:
        return None


async def _reward(
    place: Place | Container, task: Task, ended: Ended
) -> tuple[float, dict[str, float]]:
    """The reward, and what else the tests measured. Raises `_TestsBroken`."""
    if ended.code in (REFUSED, _NOT_FOUND):
        raise _TestsBroken(f"the tests could not be run: {ended}")
    if not task.rewards:
        return float(ended.code == 0), {}
    try:
        if (text := await place.reward(_REWARDS)) is not None:
            return _of_json(json.loads(text))
        if (text := await place.reward(_REWARD)) is not None:
            return _finite(float(text)), {}
    except (OSError, ValueError, TypeError) as error:
        raise _TestsBroken(f"the tests wrote no usable reward ({error})") from error
    raise _TestsBroken(
        f"the tests wrote neither {_REWARD} nor {_REWARDS} to /logs/verifier; {ended}"
    )


def _of_json(said: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(said, dict):
        return _finite(said), {}
    numbers = {str(name): _finite(value) for name, value in said.items()}
    if "reward" not in numbers and len(numbers) != 1:
        raise ValueError(f"{_REWARDS} has several numbers, {', '.join(numbers)}, and no `reward`")
    reward = numbers.pop("reward") if "reward" in numbers else numbers.popitem()[1]
    return reward, numbers


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _failure(task: Task, told: str) -> EnvironmentFailed:
    return EnvironmentFailed(-1, "exception", f"the task {task.name!r}: {told}")

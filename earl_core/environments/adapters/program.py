"""An agent that is a program of any language, or a service: it knows base URLs and a task alone.

Standard library only, because hosts run under Pythons that have nothing else of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import socket
import tempfile
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from earl_core.environments.adapters.run_program import (
    PRINTED_CHARACTERS,
    Ended,
    policy_variables,
    run_program,
)
from earl_core.environments.agent import POSTED, KeyTwice, episode_result, unique
from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.options import Options
from earl_core.system.child import bound
from earl_core.system.removal import remove_tree

_ERROR_CHARACTERS = 2000


class ProgramOptions(Options):
    """Options of an agent that is a program or a service.

    command: program and arguments, started for each episode. Its variables say where the policy
        is: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY. The task, a JSON
        object with `index` and `seed`, is its standard input and the file that EARL_TASK names;
        EARL_DIRECTORY is an empty directory that is removed at its end.
    url: address of a service instead, which is sent {"task", "base_url", "api_key"} and answers
        with the reward.
    reward: where it is. printed: the last line of standard output, or a service's answer, is a
        number or an object with `reward` or `rewards`. exit_code: 1 where the program exits with
        0, else 0. posted: by `POST OPENAI_BASE_URL/reward` before the end.
    task: put into every task.
    variables: further variables of the command.
    headers: sent with requests to the service.
    """

    command: tuple[str, ...] = ()
    url: str | None = None
    reward: Literal["printed", "exit_code", "posted"] = "printed"
    task: dict[str, Any] | None = None
    variables: dict[str, str] | None = None
    headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("command or url is missing, or both are given: give one of them")
        if self.command and shutil.which(self.command[0]) is None:
            raise ValueError(f"command names no program {self.command[0]!r}: correct it")
        if self.url and not _is_address(self.url):
            raise ValueError(f"url is {self.url!r}: give one of http or https with a host")
        if self.url and self.reward == "exit_code":
            raise ValueError("reward is exit_code, which a service does not have: leave it out")
        if (self.url and self.variables) or (self.command and self.headers):
            raise ValueError("variables are for a command, headers for a url: drop or move them")


class Program:
    """One episode of it."""

    options_model: ClassVar[type[ProgramOptions]] = ProgramOptions
    wants_policy: ClassVar[bool] = True
    policy: Mapping[str, str]

    def __init__(self, options: ProgramOptions) -> None:
        self._options = options
        self.awaits_reward = options.reward == "posted"
        """Whether the gateway takes the reward."""
        self._task: dict[str, Any] = {}

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Take the task; the message says nothing."""
        self._task = {**(self._options.task or {}), "index": prompt, "seed": seed}
        return [{"role": "user", "content": "begin"}]

    async def step(self, text: str) -> StepResult:
        """Run it to its end; the text says nothing. Raises `EnvironmentFailed`."""
        try:
            return await self._played()
        except asyncio.CancelledError as error:
            # A traceback would show where it is waited for.
            told = f"{self._shown} gave no answer, and nothing else ends it: have it end"
            raise _failure(f"{told}, or raise environment.episode_timeout_seconds") from error

    @property
    def _shown(self) -> str:
        if self._options.url:
            return f"the service {self._options.url!r}"
        return f"the program {shlex.join(self._options.command)!r:.200}"

    async def _played(self) -> StepResult:
        if self._options.url:
            said = await _asked(self._options, {"task": self._task, **self.policy})
        else:
            directory = tempfile.mkdtemp(prefix="earl-episode-")
            try:
                ended = await self._run(Path(directory))
            finally:
                remove_tree(directory)
            if self._options.reward == "exit_code":
                return episode_result(float(ended.code == 0))
            if ended.code:
                raise _failure(f"the program ended with {ended}")
            said = ended.printed
        if self._options.reward == "posted":
            return StepResult([], 0.0, True, {POSTED: True})
        return episode_result(_reward(said))

    def close(self) -> None:
        """Close nothing, because it holds nothing."""

    async def _run(self, directory: Path) -> Ended:
        given = json.dumps(self._task, ensure_ascii=False)
        task = directory / "task.json"
        task.write_text(given)
        (directory / "work").mkdir()
        variables = {
            **os.environ,
            **policy_variables(self.policy),
            "EARL_TASK": str(task),
            "EARL_DIRECTORY": str(directory / "work"),
            **(self._options.variables or {}),
        }
        return await run_program(bound(self._options.command), given, variables)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # Of a port that is none.
        return False


async def _asked(options: ProgramOptions, body: Mapping[str, Any]) -> str:
    """The service's answer. Cancelled, it ends the connection."""
    assert options.url is not None
    parts = urlsplit(options.url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.netloc)
    headers = {"Content-Type": "application/json", **(options.headers or {})}
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def exchange() -> tuple[int, str]:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        with connection.getresponse() as reply:
            return reply.status, reply.read(PRINTED_CHARACTERS).decode(errors="replace")

    try:
        status, text = await asyncio.to_thread(exchange)
    except (OSError, HTTPException) as error:
        told = f"the service {options.url!r} does not answer: {type(error).__name__}: {error}"
        raise _failure(told) from error
    finally:
        if connection.sock is not None:
            # Its thread reads no more.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    if not 200 <= status < 300:
        raise _failure(f"the service {options.url!r} answered {status}: {text[:_ERROR_CHARACTERS]}")
    return text


def _reward(said: str) -> Any:
    """The number or object of the last line. Raises `EnvironmentFailed`."""
    last = said.strip().rpartition("\n")[2]
    try:
        found = json.loads(last, object_pairs_hook=unique)
    except KeyTwice as error:
        raise _failure(f"its last line: {error}") from error
    except ValueError:
        found = None
    if isinstance(found, dict) or (isinstance(found, int | float) and not isinstance(found, bool)):
        return found
    raise _failure(
        f"its last line is {last[:200]!r}: print the reward, a number or an object with `reward`"
    )


_failure = partial(EnvironmentFailed, -1, "exception")

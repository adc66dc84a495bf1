"""A task in a container of docker, which has the agent, too. Nobody has run it yet: the machine it
was written on has no daemon; docker's client takes its arguments."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from earl_core.environments.adapters.run_program import Ended, run_program
from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.task_directories.subprocess_runtime import TASK
from earl_core.environments.task_directories.task import Task
from earl_core.system.child import bound
from earl_core.system.errors import ConfigError

logger = logging.getLogger(__name__)

_LABEL = "earl.task"
_BEGUN = "earl-begun"
_PROBE_SECONDS, _SAID_BYTES = 30, 2000
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class DockerRuntime:
    """variables: of the command. network: docker's, "host" where the gateway is on the loopback.
    mounts: folders of the host that containers read, `HOST:CONTAINER`. Raises ConfigError where
    docker is not there, or does not take a variable."""

    def __init__(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        variables: Mapping[str, str],
        network: str,
        mounts: Sequence[str],
    ) -> None:
        for task in tasks:
            for name, value in {**task.variables, **task.test_variables, **variables}.items():
                if not is_line(f"{name}={value}"):
                    raise ConfigError(
                        f"the variable {name} of the task {task.name!r} has several lines, which "
                        "docker does not take",
                        remedy="give it one line",
                    )
        self.command = list(command)
        self._network, self._mounts = network, mounts
        self._built: dict[str, str] = {}
        if shutil.which("docker") is None:
            raise ConfigError(
                "the runtime docker needs the program docker, which is not here",
                remedy="install it, or use runtime: subprocess",
            )

    def probe(self, task: Task) -> None:
        """Ask whether docker answers. Raises ConfigError."""
        told = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
        if told.returncode:
            raise ConfigError(
                f"docker does not answer ({told.stderr.strip()[-200:]})",
                remedy="start its service, or use runtime: subprocess",
            )

    def workdir(self, task: Task) -> str:
        """The folder that a task's commands run in, "" for the image's."""
        return task.workdir or ""

    @asynccontextmanager
    async def place(self, task: Task) -> AsyncIterator[Container]:
        """Give the container of one episode, which goes afterwards."""
        image = await self._image(task)
        name = f"earl-{uuid.uuid4().hex}"
        # The container ends with its client's input, and so with whoever holds that.
        client = await asyncio.create_subprocess_exec(
            *bound(["docker", *started(name, image, task, self._network, self._mounts)]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(os.environ),
            start_new_session=True,
        )
        try:
            await _begun(client)
            yield Container(task, name, self._network)
        finally:
            ended = await run_program(
                ["docker", "rm", "--force", "--volumes", name], "", dict(os.environ)
            )
            if ended.code:
                logger.warning("the container %s cannot be removed: %s", name, ended)
            with suppress(ProcessLookupError):
                client.kill()
            await client.wait()

    async def _image(self, task: Task) -> str:
        if task.image:
            return task.image
        key = str(task.directory)
        if key not in self._built:
            # Builds of the same folder share docker's cache, so several hosts may do it.
            tag = f"earl-task:{hashlib.sha256(key.encode()).hexdigest()[:16]}"
            async with asyncio.timeout(task.build_seconds):
                await _docker(["build", "--quiet", "--tag", tag, str(task.context)])
            self._built[key] = tag
        return self._built[key]


class Container:
    """Where one episode's commands run."""

    def __init__(self, task: Task, name: str, network: str) -> None:
        self._task, self._name, self._network = task, name, network

    async def put(self, text: str) -> None:
        """Write what the agent is told to the file `TASK`."""
        write = ["exec", "--interactive", self._name, "sh", "-c", f"mkdir -p /tmp; cat > {TASK}"]
        await _docker(write, text)

    async def run(self, command: Sequence[str], given: str, variables: Mapping[str, str]) -> Ended:
        """Run a command in it."""
        url = variables.get("OPENAI_BASE_URL", "")
        if self._network != "host" and urlsplit(url).hostname in _LOOPBACK:
            raise EnvironmentFailed(
                -1,
                "exception",
                f"a container does not reach the gateway at {url}: set rollout.gateway.public_url, "
                "or the option network to host",
            )
        every = {**self._task.variables, **variables}
        # Variables of docker itself would be its own, a command line is seen by every user.
        with tempfile.NamedTemporaryFile("w", prefix="earl-task-", encoding="utf-8") as file:
            file.write(lines_of(every))
            file.flush()
            words = executed(self._name, command, file.name, self._task.workdir)
            return await run_program(bound(["docker", *words]), given, dict(os.environ))

    async def add_tests(self) -> None:
        """End what the agent has left running, and show the tests."""
        # All but this shell and the first process, which waits. None may be left.
        kill = ["exec", "--user", "root", self._name, "sh", "-c", "kill -9 -1 2>/dev/null; true"]
        await _docker(kill)
        clear = (
            "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && "
            "chmod 777 /logs/verifier"
        )
        await _docker(["exec", "--user", "root", self._name, "sh", "-c", clear])
        if self._task.tests.is_dir():
            await _docker(["cp", f"{self._task.tests}/.", f"{self._name}:/tests"])
        script = f"/tests/{self._task.test.name}"
        await _docker(["cp", str(self._task.test), f"{self._name}:{script}"])
        await _docker(["exec", "--user", "root", self._name, "chmod", "+x", script])

    async def reward(self, name: str) -> str | None:
        """Return what a file of the tests' holds."""
        shown = f"if [ -f /logs/verifier/{name} ]; then echo; cat /logs/verifier/{name}; fi"
        printed = await _docker(["exec", self._name, "sh", "-c", shown])
        return printed.partition("\n")[2] if printed else None


def started(name: str, image: str, task: Task, network: str, mounts: Sequence[str]) -> list[str]:
    """Arguments that start a task's container, which says so and waits for the end of its input."""
    limits = [*(["--cpus", str(task.cpus)] if task.cpus else [])]
    limits += ["--memory", f"{task.memory_mb}m"] if task.memory_mb else []
    shown = [word for each in mounts for word in ("--volume", f"{each}:ro")]
    return [
        "run", "--rm", "--interactive", "--name", name, "--label", f"{_LABEL}={task.name}",
        "--network", network, *limits, *shown, "--entrypoint", "sh", image, "-c",
        f"echo {_BEGUN}; exec cat > /dev/null",
    ]  # fmt: skip


def executed(name: str, command: Sequence[str], variables: str, workdir: str | None) -> list[str]:
    """Arguments that run a command in it. variables: the file that has them."""
    inside = ["--workdir", workdir] if workdir else []
    return ["exec", "--interactive", "--env-file", variables, *inside, name, *command]


def is_line(text: str) -> bool:
    """Whether a file of variables can hold it: a further line would be a variable of its own, the
    host's where it is a name alone."""
    return not set(text) & set("\n\r\0")


def lines_of(variables: Mapping[str, str]) -> str:
    """The text of a file of variables."""
    lines = [f"{name}={value}" for name, value in variables.items()]
    assert all(map(is_line, lines))
    return "".join(f"{line}\n" for line in lines)


async def _begun(client: asyncio.subprocess.Process) -> None:
    """Wait until a container runs. Raises `EnvironmentFailed` where it ends before."""
    assert client.stdout is not None
    said = b""
    # An image may have to be fetched, of which docker tells first.
    async for line in client.stdout:
        if line.strip() == _BEGUN.encode():
            return
        said = (said + line)[-_SAID_BYTES:]
    raise EnvironmentFailed(-1, "exception", f"docker run ended: {said.decode(errors='replace')}")


async def _docker(words: Sequence[str], given: str = "") -> str:
    """Run docker; returns what it printed. Raises `EnvironmentFailed`."""
    ended = await run_program(bound(["docker", *words]), given, dict(os.environ))
    if ended.code:
        raise EnvironmentFailed(-1, "exception", f"docker {words[0]} ended with {ended}")
    return ended.printed

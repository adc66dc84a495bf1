"""Many environments in host processes, behind asyncio.

User code runs outside of this process: it may raise, hang, hold the interpreter lock or die, and
costs its own episode only.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.environments.hosting.host_process import HostLost, HostSettings
from earl_core.environments.hosting.host_supervisor import HostSupervisor
from earl_core.environments.rewards.reward_functions import NAME
from earl_core.system.errors import ConfigError
from earl_core.system.files import write_atomic

if TYPE_CHECKING:
    from earl_core.config.environment import EnvironmentConfig
    from earl_core.config.reward import RewardConfig
    from earl_core.environments.hosting.in_process import InProcessSupervisor

_MAX_THREADS = 64
_PACKAGE = Path(__file__).resolve().parents[2]
_PARTS = ("environments", "secrets", "system")
_MAIN = """\
import os
import sys

if sys.version_info < (3, 11):
    sys.exit(f"the hosts' Python is {sys.version.split()[0]}: give one from 3.11 on")
sys.path.append(os.getcwd())

from earl_core.environments.hosting.host import main

main(sys.argv[1:])
"""


class EnvironmentPool:
    """Plays episodes of one environment in `hosts` processes.

    name, options: as for `registry.create`; options must be what JSON can hold.
    concurrency: how many episodes are played at the same time. A host has a thread for each of its
        share of them, but at most 64, in which synchronous calls wait side by side; what is over
        that waits for a thread. Coroutine functions run in the host's event loop and need none.
    step_timeout_seconds: limit of one reset, step or close, from its beginning. The episode of a
        call over it fails. A coroutine is cancelled; any other call, or one that takes no notice,
        costs its host, whose other episodes are replayed. One that keeps the event loop or
        the interpreter lock is found when it does so again, after two to three times as long.
    start_timeout_seconds: limit for a host to import the environment and make one.
    deterministic: False: what a lost host played fails as lost, whatever the class says.
    tools: what the model may call, as `environments.tools.functions.load_tool` takes them; the
        environment's own come besides. mcp: servers of further ones, dumped `McpConfig`s.
    tool_timeout_seconds: limit of one that is a coroutine.
    python: another interpreter for the hosts, which then have nothing of ours but their program.
    log_path: file to which the hosts' output is appended; without one it is kept only for errors.
    here: play in this process and its event loop, for a debugger, unless `python` is given.

    All methods belong to the event loop that ran `start`. Several episodes run side by side, one
    call at a time each.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        hosts: int = 1,
        concurrency: int = _MAX_THREADS,
        step_timeout_seconds: float = 30.0,
        start_timeout_seconds: float = 120.0,
        deterministic: bool = True,
        tools: Sequence[str] = (),
        mcp: Sequence[dict[str, Any]] = (),
        tool_timeout_seconds: float = 10.0,
        python: str | None = None,
        log_path: Path | None = None,
        here: bool = False,
    ) -> None:
        threads = min(math.ceil(concurrency / hosts), _MAX_THREADS)
        given = dict(options or {})
        program = None
        if python is not None:
            program = (python, str(self._archive(python, log_path)))
        settings = HostSettings(
            name=name,
            options=given,
            timeout_seconds=step_timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            threads=threads,
            deterministic=deterministic,
            tools=tuple(tools),
            mcp=tuple(mcp),
            tool_timeout_seconds=tool_timeout_seconds,
            log_path=log_path,
            program=program,
        )
        self.step_timeout_seconds = step_timeout_seconds
        self.threads = hosts * threads
        """Number of synchronous calls that run at the same time, over all hosts."""
        self._supervisors: list[HostSupervisor | InProcessSupervisor]
        if here and program is None:
            from earl_core.environments.hosting.in_process import InProcessSupervisor

            self._supervisors = [InProcessSupervisor(settings)]
        else:
            self._supervisors = [HostSupervisor(settings) for _ in range(hosts)]
        self._place: dict[int, HostSupervisor | InProcessSupervisor] = {}
        self._started = False

    @classmethod
    def of(
        cls,
        environment: EnvironmentConfig,
        *,
        hosts: int | None = None,
        concurrency: int,
        log_path: Path | None,
        here: bool = False,
    ) -> EnvironmentPool:
        """Make the pool of a run's environment. hosts: instead of its own number."""
        agent = environment.agent is not None
        return cls(
            environment.played,
            environment.options,
            hosts=hosts or environment.hosts,
            concurrency=concurrency,
            step_timeout_seconds=environment.agent_timeout_seconds
            if agent
            else environment.step_timeout_seconds,
            start_timeout_seconds=environment.start_timeout_seconds,
            deterministic=environment.deterministic,
            tools=environment.tools,
            mcp=[server.model_dump() for server in environment.mcp],
            tool_timeout_seconds=environment.tool_timeout_seconds,
            python=environment.python,
            log_path=log_path,
            here=here,
        )

    @classmethod
    def of_rewards(
        cls,
        reward: RewardConfig,
        *,
        hosts: int | None = None,
        log_path: Path | None,
        here: bool = False,
    ) -> EnvironmentPool:
        """Make the pool of a run's reward functions, each a prompt by its place. hosts: instead of
        its own number."""
        functions = [
            {"label": each.title, "function": each.function, "options": each.options}
            for each in reward.functions
        ]
        return cls(
            NAME,
            {"functions": functions, "timeout_seconds": reward.timeout_seconds},
            hosts=hosts or reward.hosts,
            concurrency=reward.concurrency,
            step_timeout_seconds=reward.timeout_seconds,
            python=reward.python,
            log_path=log_path,
            here=here,
        )

    async def start(self) -> None:
        """Starts the hosts. Raises ConfigError when the environment cannot be made."""
        starts = [asyncio.ensure_future(supervisor.start()) for supervisor in self._supervisors]
        try:
            await asyncio.gather(*starts)
        except BaseException as error:
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            if isinstance(error, HostLost):
                raise ConfigError(str(error)) from error
            raise
        self._started = True

    async def stop(self) -> None:
        """Closes all environments and ends the hosts; calls under way are cancelled."""
        self._started = False
        self._place.clear()
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))

    async def reset(
        self, episode_id: int, prompt: int, seed: int, policy: Mapping[str, str] | None = None
    ) -> list[Message]:
        """Begins an episode. policy: its address, where the pool `wants_policy`. Raises
        EnvironmentFailed, ValueError when the id is in use."""
        self._check_started()
        if episode_id in self._place:
            raise ValueError(f"episode {episode_id} is open: close it before a reset")
        supervisor = min(self._supervisors, key=len)
        self._place[episode_id] = supervisor
        value = await self._call(episode_id, supervisor, "reset", [prompt, seed, policy])
        messages: list[Message] = value["messages"]
        return messages

    async def step(self, episode_id: int, text: str) -> StepResult:
        """Gives an episode the agent's answer. Raises EnvironmentFailed; the episode is over then.

        Raises ValueError for an episode that is not open, is over, or has another call under way.
        """
        return StepResult(**await self._go_on(episode_id, "step", text))

    async def use_tools(self, episode_id: int, message: Message) -> StepResult:
        """Runs the calls of an assistant's message; raises as `step` does. The result has a message
        for each call, and in `info["tool_errors"]` how many failed."""
        return StepResult(**await self._go_on(episode_id, "tools", message))

    async def legal_answers(self, episode_id: int) -> list[str]:
        """Texts that the environment takes now, if its class names them; raises as `step` does."""
        value = await self._go_on(episode_id, "legal")
        answers: list[str] = value["answers"]
        return answers

    @property
    def characters(self) -> str:
        """All that the environment names, each once, sorted; empty where it names none."""
        process = self._supervisors[0].process
        return "" if process is None else process.characters

    @property
    def deterministic(self) -> bool:
        """True when episodes of a lost host can be replayed."""
        process = self._supervisors[0].process
        return process is None or process.deterministic

    @property
    def concurrent(self) -> bool:
        """True when a host may run several calls at the same time."""
        process = self._supervisors[0].process
        return process is None or process.concurrent

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model may call, as OpenAI's API has them."""
        process = self._supervisors[0].process
        return [] if process is None else process.tools

    @property
    def notes(self) -> list[str]:
        """Notes for somebody who starts a run with these tools."""
        process = self._supervisors[0].process
        return [] if process is None else process.notes

    @property
    def prompt_count(self) -> int:
        """Number of prompts after which they come again; 0 where the environment does not say."""
        process = self._supervisors[0].process
        return 0 if process is None else process.prompt_count

    @property
    def ranges(self) -> dict[str, list[float]]:
        """The declared range of an episode's return, [least, greatest], under the empty name; of
        reward functions' scores by their labels. Absent where nothing is declared."""
        process = self._supervisors[0].process
        return {} if process is None else process.ranges

    @property
    def wants_policy(self) -> bool:
        """True when the environments, or agents, ask the policy."""
        process = self._supervisors[0].process
        return process is not None and process.wants_policy

    @property
    def awaits_reward(self) -> bool:
        """True when agents post their rewards to the gateway."""
        process = self._supervisors[0].process
        return process is not None and process.awaits_reward

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the hosts' Python ("python") and its packages, where `python` is another."""
        process = self._supervisors[0].process
        return {} if process is None else process.versions

    def hold(self, episodes: Collection[int]) -> None:
        """Calls of these episodes grow no older until the next `hold`, because what they may wait
        for is away; those of all others do."""
        for supervisor in self._supervisors:
            supervisor.hold(episodes)

    async def close(self, episode_id: int) -> None:
        """Frees an episode; unknown ones are ignored. Does not wait for the environment's close."""
        supervisor = self._place.pop(episode_id, None)
        if supervisor is not None:
            supervisor.close(episode_id)

    def _archive(self, python: str, log_path: Path | None) -> Path:
        if not os.access(python, os.X_OK) or Path(python).is_dir():
            raise ConfigError(
                f"the hosts' interpreter is {python!r}, which is no program",
                remedy="name an interpreter, like path/to/venv/bin/python",
            )
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            return write_host_archive(log_path.parent)
        self._folder = tempfile.TemporaryDirectory(prefix="earl-environments-")
        return write_host_archive(Path(self._folder.name))

    @property
    def host_pids(self) -> list[int]:
        """Process ids of the hosts that are ready."""
        return [supervisor.pid for supervisor in self._supervisors if supervisor.pid is not None]

    @property
    def host_restarts(self) -> int:
        """Number of hosts that had to be replaced since the start."""
        return sum(supervisor.restarts for supervisor in self._supervisors)

    async def _go_on(self, episode_id: int, kind: str, *said: Any) -> dict[str, Any]:
        self._check_started()
        supervisor = self._place.get(episode_id)
        if supervisor is None:
            raise ValueError(f"episode {episode_id} is not open: begin it with a reset")
        return await self._call(episode_id, supervisor, kind, list(said))

    async def _call(
        self,
        episode_id: int,
        supervisor: HostSupervisor | InProcessSupervisor,
        kind: str,
        arguments: list[Any],
    ) -> dict[str, Any]:
        try:
            return await supervisor.call(episode_id, kind, arguments)
        except EnvironmentFailed:
            self._place.pop(episode_id, None)
            raise

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("the environment pool is not running: await start() first")


def write_host_archive(directory: Path) -> Path:
    """Write the program of a host as one file that any Python from 3.11 on runs; returns its path.

    It imports the standard library alone, so that an environment with pins of its own runs beside
    nothing of ours. The same code gives the same bytes.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
        sources = [_PACKAGE / "__init__.py"]
        sources += sorted(path for part in _PARTS for path in (_PACKAGE / part).rglob("*.py"))
        for source in sources:
            name = source.relative_to(_PACKAGE.parent).as_posix()
            archive.writestr(zipfile.ZipInfo(name), source.read_bytes())
    path = directory / "environment_host.pyz"
    write_atomic(path, packed.getvalue())
    return path

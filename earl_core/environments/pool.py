"""Many environments in host processes, behind asyncio.

User code runs outside of this process: it may raise, hang, hold the interpreter lock or die, and
costs its own episode only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from earl_core.environments.base import EnvironmentConfigError, Message, StepResult
from earl_core.environments.host_keeper import HostKeeper
from earl_core.environments.host_process import HostProcess, HostStartError
from earl_core.environments.wire import encode


class EnvironmentPool:
    """Plays episodes of one environment in `hosts` processes.

    name, options: as for `registry.create`; options must be what JSON can hold.
    step_timeout_seconds: limit of one reset or step. A call that sleeps or loops is ended then; one
        that holds the interpreter lock takes its host down, and is found when it does so again,
        after two to three times as long.
    start_timeout_seconds: limit for a host to import the environment and make one.
    log_path: file to which the hosts' output is appended; without one it is kept only for errors.

    All methods belong to the event loop that ran `start`. Several episodes run side by side, one
    call at a time each.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        hosts: int = 1,
        step_timeout_seconds: float = 30.0,
        start_timeout_seconds: float = 120.0,
        log_path: Path | None = None,
    ) -> None:
        if hosts < 1 or not step_timeout_seconds > 0 or not start_timeout_seconds > 0:
            raise EnvironmentConfigError(
                f"A pool needs at least one host and timeouts above 0 s, not {hosts} hosts, "
                f"{step_timeout_seconds} s for a step and {start_timeout_seconds} s for the start."
            )
        self._options = dict(options or {})
        try:
            encode([name, self._options])
        except (TypeError, ValueError) as error:
            raise EnvironmentConfigError(
                f"The options of environment {name!r} must be numbers, texts, lists and maps: "
                f"{error}."
            ) from error
        self._name = name
        self._step_timeout = step_timeout_seconds
        self._start_timeout = start_timeout_seconds
        self._log_path = log_path
        self._keepers = [HostKeeper(self._start_process) for _ in range(hosts)]
        self._place: dict[int, HostKeeper] = {}
        self._started = False

    async def start(self) -> None:
        """Starts the hosts. Raises EnvironmentConfigError when the environment cannot be made."""
        starts = [asyncio.ensure_future(keeper.start()) for keeper in self._keepers]
        try:
            await asyncio.gather(*starts)
        except BaseException as error:
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            if isinstance(error, HostStartError):
                raise EnvironmentConfigError(str(error)) from error
            raise
        self._started = True

    async def stop(self) -> None:
        """Closes all environments and ends the hosts; calls under way are cancelled."""
        self._started = False
        self._place.clear()
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))

    async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
        """Begins an episode. Raises EnvironmentFailed, ValueError when the id is in use."""
        self._check_started()
        if episode_id in self._place:
            raise ValueError(f"Episode {episode_id} is open; close it before a reset.")
        keeper = min(self._keepers, key=len)
        self._place[episode_id] = keeper
        reply = await self._call(episode_id, keeper, "reset", [prompt, seed])
        messages: list[Message] = reply[1]
        return messages

    async def step(self, episode_id: int, text: str) -> StepResult:
        """Gives an episode the agent's answer. Raises EnvironmentFailed; the episode is over then.

        Raises ValueError for an episode that is not open, is over, or has another call under way.
        """
        self._check_started()
        keeper = self._place.get(episode_id)
        if keeper is None:
            raise ValueError(f"Episode {episode_id} is not open; begin it with a reset.")
        _, messages, reward, done, info = await self._call(episode_id, keeper, "step", [text])
        return StepResult(messages, reward, done, info)

    async def close(self, episode_id: int) -> None:
        """Frees an episode; unknown ones are ignored. Does not wait for the environment's close."""
        keeper = self._place.pop(episode_id, None)
        if keeper is not None:
            keeper.close(episode_id)

    @property
    def open_episodes(self) -> int:
        """How many episodes are open."""
        return len(self._place)

    @property
    def host_pids(self) -> list[int]:
        """Process ids of the hosts that are ready."""
        return [keeper.pid for keeper in self._keepers if keeper.pid is not None]

    @property
    def host_restarts(self) -> int:
        """How many hosts had to be replaced since the start."""
        return sum(keeper.restarts for keeper in self._keepers)

    async def _call(
        self, episode_id: int, keeper: HostKeeper, kind: str, arguments: list[Any]
    ) -> list[Any]:
        try:
            return await keeper.call(episode_id, kind, arguments)
        except Exception as error:
            if not isinstance(error, ValueError):
                self._place.pop(episode_id, None)
            raise

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("The environment pool is not running; await start() first.")

    def _start_process(
        self, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> Awaitable[HostProcess]:
        return HostProcess.start(
            self._name,
            self._options,
            timeout_seconds=self._step_timeout,
            start_timeout_seconds=self._start_timeout,
            log_path=self._log_path,
            on_message=on_message,
            on_lost=on_lost,
        )

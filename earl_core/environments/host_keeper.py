"""Keeps one host alive: calls go through it, and when its process is lost its episodes are rebuilt.

A lost process takes all its environments along, but the fault is at most one episode's.
Environments are deterministic, so a fresh process gets the recorded texts of the others again. The
calls that were under way are suspects: they run one at a time, and the one that costs the process
once more is blamed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.host_process import HostProcess, HostStartError

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3

Starter = Callable[[Callable[[list[Any]], None], Callable[[], None]], Awaitable[HostProcess]]


@dataclass
class Call:
    """A call under way: "reset" or "step", its arguments, and who waits for the reply."""

    id: int
    kind: str
    arguments: list[Any]
    reply: asyncio.Future[list[Any]]
    sent: bool = False
    losses: int = 0
    """Processes lost while it was under way."""


@dataclass
class Episode:
    """An open episode, and all that is needed to rebuild its environment."""

    id: int
    past: list[tuple[str, list[Any]]] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)
    call: Call | None = None
    done: bool = False
    failure: EnvironmentFailed | None = None
    """Found when it was rebuilt between two calls; raised by the next one."""


class _Lost(Exception):
    """The process was lost during a recovery; a signal between coroutines."""


@dataclass
class _Trial:
    """The state of a search for the episode that costs the process."""

    one_by_one: bool = False
    accused: Episode | None = None


class HostKeeper:
    """One place for a host process and the episodes that live in it.

    start_process: starts a process, given its two callbacks.
    """

    def __init__(self, start_process: Starter) -> None:
        self._start_process = start_process
        self._process: HostProcess | None = None
        self._ready = False
        self._recovery: asyncio.Task[None] | None = None
        self._episodes: dict[int, Episode] = {}
        self._calls: dict[int, tuple[Episode, Call]] = {}
        self._replays: dict[int, asyncio.Future[list[Any]]] = {}
        self._ids = itertools.count()
        self._stopped = False
        self.restarts = 0
        """How often a process was replaced."""

    @property
    def pid(self) -> int | None:
        """The process id of the host, None while there is none."""
        return self._process.pid if self._process is not None and self._ready else None

    def __len__(self) -> int:
        return len(self._episodes)

    async def start(self) -> None:
        """Starts the process. Raises EnvironmentConfigError or HostStartError."""
        for left in reversed(range(_MAX_FAILED_STARTS)):
            try:
                self._process = await self._start_process(self._on_message, self._on_lost)
                break
            except HostStartError as error:
                # A fault of its own would come again.
                if not error.killed or not left:
                    raise
        self._ready = True

    async def stop(self) -> None:
        """Ends the process; calls under way are cancelled."""
        self._stopped = True
        self._ready = False
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        for _, call in self._calls.values():
            call.reply.cancel()
        self._calls.clear()
        self._episodes.clear()
        if self._process is not None:
            await self._process.stop()

    async def call(self, episode_id: int, kind: str, arguments: list[Any]) -> list[Any]:
        """Runs one call of an episode and returns the reply: its kind, then its values.

        Raises EnvironmentFailed; the episode is then forgotten. ValueError for an episode that is
        not open, over, or has another call under way.
        """
        if kind == "reset":
            if episode_id in self._episodes:
                raise ValueError(f"Episode {episode_id} is open; close it before a reset.")
            self._episodes[episode_id] = Episode(episode_id)
        episode = self._episodes.get(episode_id)
        if episode is None or episode.done:
            state = "not open" if episode is None else "over"
            raise ValueError(f"Episode {episode_id} is {state}; begin it with a reset.")
        if episode.failure is not None:
            del self._episodes[episode_id]
            raise episode.failure
        if episode.call is not None:
            raise ValueError(f"Episode {episode_id} has a call under way; wait for its reply.")
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        call = Call(next(self._ids), kind, arguments, reply)
        episode.call = call
        self._calls[call.id] = (episode, call)
        if self._ready:
            self._send(episode, call)
        elif self._recovery is None or self._recovery.done():
            # An earlier recovery gave up; a new episode tries again.
            self._recovery = asyncio.create_task(self._recover(all_innocent=True))
        return await reply

    def close(self, episode_id: int) -> None:
        """Closes an episode; its call under way, if any, is cancelled. Unknown ones are ignored."""
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return
        if episode.call is not None:
            self._calls.pop(episode.call.id, None)
            episode.call.reply.cancel()
        if self._ready:
            self._close_in_host(episode_id)

    def _send(self, episode: Episode, call: Call) -> None:
        assert self._process is not None
        call.sent = True
        self._process.send([call.kind, call.id, episode.id, *call.arguments])

    def _on_message(self, message: list[Any]) -> None:
        if message[0] == "stuck":
            if self._ready:
                logger.warning("an environment host is replaced: %s", message[1])
                self._begin_recovery(all_innocent=True)
            return
        replay = self._replays.pop(message[1], None)
        if replay is not None:
            if not replay.done():
                replay.set_result(message)
        elif message[1] in self._calls:  # else its episode was closed meanwhile
            self._settle(message)

    def _settle(self, message: list[Any]) -> None:
        """Gives a call its reply."""
        episode, call = self._calls[message[1]]
        if message[0] == "failed":
            self._fail(episode, message[2], message[3])
            return
        del self._calls[call.id]
        episode.call = None
        episode.past.append((call.kind, call.arguments))
        episode.last = [message[0], *message[2:]]
        episode.done = message[0] == "result" and message[4]
        if not call.reply.done():
            call.reply.set_result(episode.last)

    def _fail(self, episode: Episode, reason: str, detail: str) -> None:
        failure = EnvironmentFailed(episode.id, reason, detail)
        call, episode.call = episode.call, None
        if call is None:
            episode.failure = failure
            return
        self._episodes.pop(episode.id, None)
        self._calls.pop(call.id, None)
        if not call.reply.done():
            call.reply.set_exception(failure)

    def _on_lost(self) -> None:
        for replay in self._replays.values():
            if not replay.done():
                replay.set_exception(_Lost())
        self._replays.clear()
        if self._ready and not self._stopped:
            self._begin_recovery(all_innocent=False)

    def _begin_recovery(self, all_innocent: bool) -> None:
        self._ready = False
        self._recovery = asyncio.create_task(self._recover(all_innocent))

    async def _recover(self, all_innocent: bool) -> None:
        try:
            await self._replace(all_innocent)
        except Exception as error:
            logger.exception("an environment host could not be replaced")
            for episode in list(self._episodes.values()):
                self._fail(episode, "host_died", str(error))

    async def _replace(self, all_innocent: bool) -> None:
        """Starts a fresh process, rebuilds the episodes, finds the culprit, and goes on."""
        suspects = [] if all_innocent else self._under_way()
        lost = self._process
        if lost is not None:
            tail = await lost.abandon()
            if not all_innocent:
                logger.warning("an environment host was lost; its log ends:\n%s", tail)
            if lost.killed_from_outside and all(call.losses < 2 for _, call in suspects):
                suspects = []
        for _, call in self._calls.values():
            call.sent = False
        trial = _Trial()
        failed_starts = 0
        while True:
            try:
                process = await self._start_process(self._on_message, self._on_lost)
                self._process = process
                self.restarts += 1
                await self._rebuild(trial)
                await self._try(suspects, trial)
                if not process.lost:
                    break
            except HostStartError:
                failed_starts += 1
                if failed_starts == _MAX_FAILED_STARTS:
                    raise
                continue
            except _Lost:
                pass
            tail = await process.abandon()
            if trial.accused is None:
                # All were rebuilt at once; the next time it is seen in whose turn it happens.
                trial.one_by_one = True
                continue
            self._fail(trial.accused, "timeout" if process.timed_out else "host_died", tail)
            suspects = []
        self._ready = True
        for episode, call in list(self._calls.values()):
            self._send(episode, call)

    def _under_way(self) -> list[tuple[Episode, Call]]:
        """The calls that the process has, oldest first: it runs them in that order."""
        found = [(episode, call) for episode, call in self._calls.values() if call.sent]
        for _, call in found:
            call.losses += 1
        return found

    async def _rebuild(self, trial: _Trial) -> None:
        """Gives every episode its past again. Raises _Lost."""
        trial.accused = None
        lasting = [e for e in self._episodes.values() if e.past and not e.done and not e.failure]
        if not trial.one_by_one:
            await asyncio.gather(*(self._replay(episode) for episode in lasting))
            return
        for episode in lasting:
            trial.accused = episode
            await self._replay(episode)
        trial.accused = None

    async def _replay(self, episode: Episode) -> None:
        message: list[Any] = []
        for kind, arguments in episode.past:
            message = await self._ask(next(self._ids), kind, episode.id, arguments)
            if message[0] == "failed":
                break
        if self._episodes.get(episode.id) is not episode:
            self._close_in_host(episode.id)
        elif message[0] == "failed":
            self._fail(episode, "not_deterministic", f"Its rebuilding {message[2]}: {message[3]}")
        elif [message[0], *message[2:]] != episode.last:
            self._close_in_host(episode.id)
            self._fail(
                episode,
                "not_deterministic",
                "It answered the same texts differently after its process was replaced. Let all "
                "its randomness come from the prompt index and the seed.",
            )

    async def _try(self, suspects: list[tuple[Episode, Call]], trial: _Trial) -> None:
        """Runs the calls of the suspects one at a time. Raises _Lost, with the accused set."""
        for episode, call in suspects:
            if call.id not in self._calls:
                continue  # closed or failed meanwhile
            trial.accused = episode
            message = await self._ask(call.id, call.kind, episode.id, call.arguments)
            if call.id in self._calls:
                self._settle(message)
            else:
                self._close_in_host(episode.id)
        trial.accused = None

    async def _ask(self, call: int, kind: str, episode: int, arguments: list[Any]) -> list[Any]:
        """Runs a call outside of the normal way. Raises _Lost."""
        assert self._process is not None
        if self._process.lost:
            raise _Lost
        replay: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._replays[call] = replay
        self._process.send([kind, call, episode, *arguments])
        return await replay

    def _close_in_host(self, episode: int) -> None:
        assert self._process is not None
        self._process.send(["close", next(self._ids), episode])

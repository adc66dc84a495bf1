"""Keeps one host alive: calls go through it, and when it is lost its episodes are replayed.

Environments are deterministic, so a fresh process gets the recorded texts of its episodes again. A
host that a call over its deadline has cost names that call, whose episode fails. Nobody can say
which call crashed a host or kept it silent: those that were under way are repeated in turn, and the
one that costs the process again fails. An episode that cannot be replayed is lost, as are all of an
environment, or a configuration, with `deterministic = False`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.hosting.host_process import HostLost, HostProcess, HostSettings

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_MAX_FAILED_REPLAYS = 3

Reply = dict[str, Any]


@dataclass(eq=False)
class PendingCall:
    """A call under way: its kind as in `host_calls.Call`, arguments, who waits for the value."""

    episode: OpenEpisode
    kind: str
    arguments: list[Any]
    reply: asyncio.Future[Reply]
    losses: int = 0
    """Processes lost while it was under way."""


@dataclass(eq=False)
class OpenEpisode:
    """An open episode, and all that is needed to replay it: the calls and the last value."""

    id: int
    past: list[tuple[str, list[Any]]] = field(default_factory=list)
    last: Reply = field(default_factory=dict)
    call: PendingCall | None = None
    failure: EnvironmentFailed | None = None
    """Found when it was replayed between two calls; raised by the next one."""

    @property
    def done(self) -> bool:
        """True when the episode takes no more steps."""
        return bool(self.last.get("done"))

    @property
    def lasting(self) -> bool:
        """True when a fresh process needs its environment."""
        return bool(self.past) and not self.done and self.failure is None


class HostSupervisor:
    """One place for a host process and the episodes that live in it."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._process: HostProcess | None = None
        self._ready = False
        self._recovery: asyncio.Task[None] | None = None
        self._episodes: dict[int, OpenEpisode] = {}
        self._sent: dict[int, PendingCall] = {}
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._held: Collection[int] = ()
        self.restarts = 0
        """Number of times that a process was replaced."""

    @property
    def pid(self) -> int | None:
        """The process id of the host, None while there is none."""
        return self._process.pid if self._process is not None and self._ready else None

    @property
    def process(self) -> HostProcess | None:
        """The process, None before the first has started."""
        return self._process

    def __len__(self) -> int:
        return len(self._episodes)

    async def start(self) -> None:
        """Starts the process. Raises ConfigError or HostLost."""
        for left in reversed(range(_MAX_FAILED_STARTS)):
            try:
                self._process = await self._start_process()
                break
            except HostLost as error:
                # A fault of its own would come again.
                if not error.killed or not left:
                    raise
        self._ready = True
        if self._process is not None and self._process.lost:
            self._on_lost()

    async def stop(self) -> None:
        """Ends the process; calls under way are cancelled."""
        self._ready = False
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        for episode in self._episodes.values():
            if episode.call is not None:
                episode.call.reply.cancel()
        self._episodes.clear()
        if self._process is not None:
            await self._process.stop()

    async def call(self, episode_id: int, kind: str, arguments: list[Any]) -> Reply:
        """Runs one call of an episode and returns the reply's value.

        The pool sees to it that each is reset once. Raises EnvironmentFailed; the episode is then
        forgotten. ValueError for one that is over or has a call under way.
        """
        if kind == "reset":
            self._episodes[episode_id] = OpenEpisode(episode_id)
        episode = self._episodes.get(episode_id)
        if episode is None or episode.done:
            raise ValueError(f"episode {episode_id} is over: begin it with a reset")
        if episode.failure is not None:
            del self._episodes[episode_id]
            raise episode.failure
        if episode.call is not None:
            raise ValueError(f"episode {episode_id} has a call under way: wait for its reply")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        episode.call = PendingCall(episode, kind, arguments, reply)
        if self._ready:
            self._send(episode.call)
        elif self._recovery is None or self._recovery.done():
            # An earlier recovery gave up; a new episode tries again.
            self._recovery = asyncio.create_task(self._recover())
        return await reply

    def hold(self, episodes: Collection[int]) -> None:
        """Calls of these episodes grow no older, and those of all others do."""
        self._held = episodes
        if self._process is not None:
            self._process.send(self._holding)

    def close(self, episode_id: int) -> None:
        """Closes an episode; its call under way, if any, is cancelled. Unknown ones are ignored."""
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return
        if episode.call is not None:
            episode.call.reply.cancel()
        self._close_in_host(episode)

    async def _start_process(self) -> HostProcess:
        process = await HostProcess.start(self._settings, self._on_message, self._on_lost)
        process.send(self._holding)
        return process

    @property
    def _holding(self) -> dict[str, Any]:
        return {"kind": "hold", "episodes": list(self._held)}

    def _send(self, call: PendingCall) -> None:
        number = next(self._numbers)
        self._sent[number] = call
        self._pass_on(number, call.episode, call.kind, call.arguments)

    def _pass_on(self, number: int, episode: OpenEpisode, kind: str, arguments: list[Any]) -> None:
        assert self._process is not None
        message = {"kind": kind, "call": number, "episode": episode.id, "arguments": arguments}
        self._process.send(message)

    def _close_in_host(self, episode: OpenEpisode) -> None:
        if self._process is not None:
            self._process.send({"kind": "close", "episode": episode.id})

    def _on_message(self, message: Reply) -> None:
        number = message["call"]
        asked = self._asked.pop(number, None)
        if asked is not None:
            if not asked.done():
                asked.set_result(message)
        elif number in self._sent:
            self._settle(self._sent.pop(number), message)

    def _settle(self, call: PendingCall, message: Reply) -> None:
        """Gives a call its reply."""
        episode = call.episode
        if message["kind"] == "failed":
            self._fail(episode, message["reason"], message["detail"])
            return
        episode.call = None
        episode.past.append((call.kind, call.arguments))
        episode.last = message["value"]
        if not call.reply.done():
            call.reply.set_result(episode.last)

    def _fail(self, episode: OpenEpisode, reason: str, detail: str) -> None:
        if not self._is_open(episode):
            return
        failure = EnvironmentFailed(episode.id, reason, detail)
        if episode.call is None:
            episode.failure = failure
            return
        del self._episodes[episode.id]
        if not episode.call.reply.done():
            episode.call.reply.set_exception(failure)

    def _is_open(self, episode: OpenEpisode) -> bool:
        return self._episodes.get(episode.id) is episode

    def _on_lost(self) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(HostLost())
        if self._ready:
            self._ready = False
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        try:
            await self._replace()
        except Exception as error:
            logger.exception("an environment host could not be replaced")
            for episode in list(self._episodes.values()):
                self._fail(episode, "lost", str(error))

    async def _replace(self) -> None:
        """Starts a fresh process, replays the episodes, and goes on."""
        doubted = await self._end_lost()
        if self._process is not None and not self._process.deterministic:
            doubted = []
            for episode in list(self._episodes.values()):
                self._fail(episode, "lost", "its host was lost, and it cannot be played again")
        failed_starts = failed_replays = 0
        while True:
            try:
                self._process = process = await self._start_process()
            except HostLost:
                failed_starts += 1
                if failed_starts == _MAX_FAILED_STARTS:
                    raise
                continue
            self.restarts += 1
            lasting = [episode for episode in self._episodes.values() if episode.lasting]
            culprit = None
            with suppress(HostLost):
                await asyncio.gather(*map(self._replay, lasting))
                culprit = await self._repeat(doubted, process)
            if not process.lost:
                break
            tail = await process.abandon()
            if culprit is not None:
                self._fail(culprit.episode, "timeout" if process.timed_out else "host_died", tail)
            elif not process.call_timed_out:
                failed_replays += 1
                if failed_replays == _MAX_FAILED_REPLAYS:
                    raise HostLost(f"its host was lost as it was replayed:\n{tail}")
        self._ready = True
        for episode in self._episodes.values():
            if episode.call is not None:
                self._send(episode.call)

    async def _end_lost(self) -> list[PendingCall]:
        """Ends the lost process; returns the calls that may have been the cause, oldest first."""
        under_way = [call for call in self._sent.values() if self._is_open(call.episode)]
        self._sent.clear()
        process = self._process
        if process is None:
            return []
        tail = await process.abandon()
        if process.call_timed_out:
            logger.warning("an environment host is replaced: a call is over its deadline")
            return []
        logger.warning("an environment host was lost; its log ends:\n%s", tail)
        for call in under_way:
            call.losses += 1
        allowed = 1 if process.killed_from_outside else 0
        return [call for call in under_way if call.losses > allowed]

    async def _replay(self, episode: OpenEpisode) -> None:
        """Gives an episode its past again. Raises HostLost."""
        message: Reply = {}
        for kind, arguments in episode.past:
            message = await self._ask(episode, kind, arguments)
            if not self._is_open(episode):
                return
            if message["kind"] == "failed":
                timeout = message["reason"] == "timeout"
                why = f"its replay failed: {message['reason']}: {message['detail']}"
                self._fail(episode, "lost" if timeout else "not_deterministic", why)
                return
        if message["value"] != episode.last:
            self._close_in_host(episode)
            self._fail(
                episode,
                "not_deterministic",
                "it answered the same texts differently after its process was replaced: let all "
                "its randomness come from the prompt index and the seed",
            )

    async def _repeat(self, doubted: list[PendingCall], process: HostProcess) -> PendingCall | None:
        """Runs the calls one after the other, each removed as it begins, while the process lives.
        Returns the one that cost it."""
        while doubted and not process.lost:
            call = doubted.pop(0)
            if not self._is_open(call.episode) or call.reply.done():
                continue
            try:
                message = await self._ask(call.episode, call.kind, call.arguments)
            except HostLost:
                return call
            if self._is_open(call.episode):
                self._settle(call, message)
        return None

    async def _ask(self, episode: OpenEpisode, kind: str, arguments: list[Any]) -> Reply:
        """Runs a call outside of the normal way. Raises HostLost."""
        assert self._process is not None
        if self._process.lost:
            raise HostLost
        number = next(self._numbers)
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        self._pass_on(number, episode, kind, arguments)
        reply: Reply = await future
        return reply

"""The HTTP server of a rollout worker: agents ask it for the policy's answers.

It listens on the loopback, and behind the `front` of its process where there is one.
`endpoints` has what it answers. The key of a session is its episode's secret; a request without it
is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.aside import Aside
from earl_core.rollout.gateway.asked_prompts import AskedPrompts
from earl_core.rollout.gateway.batches import Batches
from earl_core.rollout.gateway.endpoints import Endpoints, refusal
from earl_core.rollout.gateway.front import Front, Server, server_config
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.listening import listen
from earl_core.trajectory.samples import EpisodeSpec

_between: list[socket.socket] = []
"""Sockets that listen for no gateway at the moment, until the process ends: an agent that goes on
after its rollout must not ask whoever takes its gateway's port, and do as he answers."""
_STANDING_BRANCHES = 256
_STANDING_SECONDS = 0.25


class Gateway:
    """Sessions in front of one engine. An asynchronous context manager; all of it belongs to one
    event loop.

    port: on 127.0.0.1; 0: a free one. askers, patience: of a lockstep engine's `Batches`. failed:
    gets what ends the rollout: errors of the engine, and `ContextOverflow`.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        port: int = 0,
        askers: Callable[[], int] | None = None,
        patience: float = 0.0,
    ) -> None:
        self._port = port
        self._engine, self._chat, self._settings, self._meter = engine, chat, settings, meter
        self._sessions: dict[str, Session] = {}
        self._batches = Batches(engine, askers, patience)
        self._aside, self._asked_prompts = Aside(chat), AskedPrompts()
        self._stood = 0
        self._front: Front | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Gateway:
        endpoints = Endpoints(
            self._engine,
            self._chat,
            self._settings,
            self._meter,
            self._sessions,
            self._batches,
            self._aside,
            self.failed,
        )
        self._application = Starlette(
            routes=endpoints.routes, exception_handlers={HTTPException: refusal}
        )
        if public := self._settings.public:
            self._front = Front.join(public, self._application, self._sessions.__contains__)
        if self._port or not _between:
            self._socket = listen("127.0.0.1", self._port)
        else:
            self._socket = _between.pop()
        self._server = Server(server_config(self._application))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket.dup()]))
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.should_exit = True
        if self._front is not None:
            await self._front.leave(self._application)
        await asyncio.wait({self._serving})
        if self._port:
            self._socket.close()
        else:
            _between.append(self._socket)
        await self._batches.close()
        self._aside.close()

    def open(
        self,
        spec: EpisodeSpec,
        trained: bool = True,
        asked_prompts: AskedPrompts | None = None,
    ) -> Session:
        """A new session of an episode. trained, asked_prompts: see `Session`; None: those of the
        gateway."""
        longest = self._engine.max_model_len
        settings, meter = self._settings, self._meter
        aside, asked = self._aside, asked_prompts or self._asked_prompts
        session = Session(spec, self._chat, settings, meter, longest, aside, asked, trained)
        self._sessions[session.name] = session
        return session

    async def stand(self, key: str, over: Callable[[], bool]) -> None:
        """Have a session without a name for people, until `over`; raises what `failed` gets.

        Now and then another one takes its place, so that old conversations cost no memory.
        """
        standing, left = None, set[Session]()
        while not over():
            if standing is None or standing.begun >= _STANDING_BRANCHES:
                left |= {standing} if standing else set()
                seed = secrets.randbits(62)
                # People go on with conversations as they like.
                spec, asked = EpisodeSpec(self._stood, 0, 0, seed), AskedPrompts()
                standing = self.open(spec, asked_prompts=asked)
                self._stood += 1
                standing.key, self._sessions[""] = key, standing
            for session in [each for each in left if not each.waits.busy]:
                left.remove(session)
                await self.close(session)
            await asyncio.wait({self.failed}, timeout=_STANDING_SECONDS)
            if self.failed.done():
                self.failed.result()

    async def close(self, session: Session) -> None:
        """Free what the engine holds of a session that is over."""
        del self._sessions[session.name]
        await session.counted()
        await self._engine.cancel(session.sequence_ids)
        self._engine.finish(session.sequence_ids)

    def base_url(self, session: Session) -> str:
        """Return the address that a client on this host takes as its `base_url`."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/{session.name}/v1"

    def address(self, session: Session) -> dict[str, str]:
        """Return the address and the key for an environment, which is on this host."""
        return {"base_url": self.base_url(session), "api_key": session.key}

    def public_address(self, session: Session) -> dict[str, str]:
        """Return the address and the key for an agent, which may be elsewhere."""
        if self._front is None:
            return self.address(session)
        url = f"{self._front.url.rstrip('/')}/{session.name}/v1"
        return {"base_url": url, "api_key": session.key}

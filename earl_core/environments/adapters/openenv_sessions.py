"""Sessions with environments of OpenEnv: objects in this process, or a server's by WebSocket.

The server's protocol is that of `openenv.core.env_client`, whose client is not used: it connects
anew in silence, in the middle of an episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from earl_core.environments.base import EnvironmentFailed
from earl_core.environments.endpoints import is_local, open_endpoint, read_reply
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.import_path import import_object, import_package

_SCHEMA_SECONDS = 10.0
_FREE_SECONDS, _FREE_POLL_SECONDS = 20.0, 0.1
_MOST_BYTES = 64 << 20


class Invalid(EarlError):
    """An action that the environment does not take; the message is for the model."""


@dataclass(frozen=True)
class Observed:
    """The environment's answer. fields: of the observation, as JSON has them."""

    fields: dict[str, Any]
    reward: float
    done: bool


class Session(Protocol):
    """One episode. schema: of its actions. waits: whether its coroutines wait for anything, else
    they run what may take long. concurrent, deterministic: as `Environment` has them."""

    schema: dict[str, Any]
    waits: bool
    concurrent: bool
    deterministic: bool

    async def reset(self, arguments: Mapping[str, Any]) -> Observed:
        """Begin; arguments that the environment's reset does not take are left out."""
        ...

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Raises `Invalid`."""
        ...

    async def close(self) -> None:
        """Free it."""
        ...


class Hosted:
    """An object of an environment class. environment, action: import paths of it and of the class
    of its actions. options: given to its constructor. Raises ConfigError."""

    deterministic = True

    def __init__(self, environment: str, action: str, options: Mapping[str, Any]) -> None:
        server = "openenv.core.env_server"
        self._interface = import_package(f"{server}.interfaces", "openenv").Environment
        serialization = import_package(f"{server}.serialization", "openenv")
        self._deserialize = serialization.deserialize_action
        kind = import_object(environment, "the option environment")
        self._action = import_object(action, "the option action")
        if not (isinstance(kind, type) and issubclass(kind, self._interface)):
            raise ConfigError(
                f"the option environment {environment!r} is no environment of openenv",
                remedy="name a subclass of openenv.core.env_server.interfaces.Environment",
            )
        if getattr(kind, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
            raise ConfigError(
                f"{environment} wants all its calls from one thread",
                remedy="serve it with openenv, and give the option url",
            )
        self.schema = self._action.model_json_schema()
        self.concurrent = bool(getattr(kind, "SUPPORTS_CONCURRENT_SESSIONS", False))
        self._world = kind(**options)
        self.waits = self._is_own("reset_async") or self._is_own("step_async")

    async def reset(self, arguments: Mapping[str, Any]) -> Observed:
        """Call the object's own reset, with those arguments that it takes."""
        method = self._world.reset_async if self._is_own("reset_async") else self._world.reset
        known = inspect.signature(method).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
        taken = {name: arguments[name] for name in arguments if takes_all or name in known}
        return await self._observed(method(**taken))

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Call the object's own step with the action, read as its class; `Invalid` for a misfit."""
        from pydantic import ValidationError

        try:
            read = self._deserialize(dict(action), self._action)
        except ValidationError as error:
            raise _invalid(error.errors()) from None
        method = self._world.step_async if self._is_own("step_async") else self._world.step
        return await self._observed(method(read))

    async def close(self) -> None:
        """Close the object."""
        self._world.close()

    def _is_own(self, name: str) -> bool:
        return getattr(type(self._world), name) is not getattr(self._interface, name)

    async def _observed(self, answer: Any) -> Observed:
        observation = await answer if inspect.isawaitable(answer) else answer
        fields = observation.model_dump(mode="json", exclude={"reward", "done"})
        return Observed(fields, float(observation.reward or 0.0), bool(observation.done))


class Remote:
    """A session of a server. token: sent as its bearer token. Raises ConfigError."""

    waits = concurrent = True
    deterministic = False

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connect = import_package("websockets.asyncio.client", "websockets").connect
        self._socket: Any = None
        self.schema = _schema(self._url, tuple(self._headers.items()))

    async def reset(self, arguments: Mapping[str, Any]) -> Observed:
        """Open a session and reset it there. Waits for a session where the server has all that it
        allows in use."""
        for _ in range(int(_FREE_SECONDS / _FREE_POLL_SECONDS)):
            await self._open()
            reply = await self._ask("reset", arguments)
            if _code(reply) != "CAPACITY_REACHED":
                return self._observed(reply)
            await self.close()
            await asyncio.sleep(_FREE_POLL_SECONDS)
        raise self._lost(
            f"all its sessions were in use for {_FREE_SECONDS:g} s: serve it with a larger "
            "max_concurrent_envs, or lower rollout.max_running_requests"
        )

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Send the action to the server's session."""
        return self._observed(await self._ask("step", action))

    async def close(self) -> None:
        """Close the server's session and the connection; a server that does not answer is left."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):
                await socket.send(json.dumps({"type": "close"}))
            with suppress(Exception):
                await socket.close()

    async def _open(self) -> None:
        options: dict[str, Any] = {"proxy": None} if is_local(self._url) else {}
        try:
            self._socket = await self._connect(
                f"ws{self._url.removeprefix('http')}/ws",
                max_size=_MOST_BYTES,
                additional_headers=self._headers,
                **options,
            )
        except Exception as error:
            raise self._lost(f"it cannot be reached: {type(error).__name__}: {error}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            # What a server says that then closes is received all the same.
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._socket.recv())
        except (OSError, ValueError, ConnectionClosed) as error:
            raise self._lost(f"the session ended: {type(error).__name__}: {error}") from error
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise self._lost(f"it said {reply!r:.200}, which is not OpenEnv's protocol")
        return reply

    def _observed(self, reply: dict[str, Any]) -> Observed:
        data, code = reply["data"], _code(reply)
        if code == "VALIDATION_ERROR":
            raise _invalid(data.get("errors") or [{"msg": data.get("message")}])
        if code in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
            raise self._lost(f"{code}: {data.get('message')}")
        if code is not None:
            raise EarlError(f"the OpenEnv server {self._url} says {code}: {data.get('message')}")
        fields = data.get("observation") or {}
        return Observed(fields, float(data.get("reward") or 0.0), bool(data.get("done")))

    def _lost(self, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(-1, "lost", f"the OpenEnv server {self._url}: {why}")


def _code(reply: Mapping[str, Any]) -> str | None:
    """The code of a reply that is an error."""
    return str(reply["data"].get("code")) if reply.get("type") == "error" else None


def _invalid(errors: Any) -> Invalid:
    def line(error: Mapping[str, Any]) -> str:
        where = ".".join(map(str, error.get("loc", ())))
        return f"{where}: {error.get('msg')}" if where else str(error.get("msg"))

    return Invalid("; ".join(map(line, errors)))


@lru_cache
def _schema(url: str, headers: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The schema of the server's actions; asked for once by each process. Raises ConfigError."""
    request = urllib.request.Request(f"{url}/schema", headers=dict(headers))
    try:
        with open_endpoint(request, _SCHEMA_SECONDS) as reply:
            schema: dict[str, Any] = json.loads(read_reply(reply, _SCHEMA_SECONDS))["action"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"the OpenEnv server {url} does not tell the schema of its actions at {url}/schema: "
            f"{type(error).__name__}: {error}",
            remedy="start it, or correct the option url",
        ) from error
    return schema

"""Limits on what a Prefect server may hand to this process: no results, nothing to unpickle.

A state may name a result: where it is stored and how it is to be read. Prefect reads it with the
serializer that the stored bytes name, pickle among them, and from any storage that the server
describes; a server that is somebody else's would run code here. EARL needs no result from a server:
flows hand theirs on in this process, and stages are found in the run directory. So

- an answer of the server with a state that carries a result is refused before Prefect parses it;
- a stored result is read only as plain JSON, whatever its bytes ask for;
- and only from the result directory of a run that this process has open; none is stored elsewhere.

Nor is a password sent to another user: a server of this machine that speaks plain HTTP is asked
only as long as whoever listened there at first still does. (EARL's own show a certificate.)

Prefect has no setting for any of it, hence the replaced methods.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prefect._internal import websockets
from prefect.client import base
from prefect.client.schemas.objects import StateType
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultRecord, ResultStore
from prefect.serializers import JSONSerializer

from earl_core.system.errors import EarlError
from earl_core.system.files import is_regular
from earl_core.system.listeners import owners_of

SERIALIZER = JSONSerializer(object_decoder=None)
"""Serializer of results: JSON. Prefect's own decoder would import the classes it names."""

_STATES = frozenset(state.value for state in StateType)
_directories: set[Path] = set()

_RESULT = re.compile("[0-9a-f]{64}")
"""Name of a stored result: the digest that Prefect makes of the cache key."""


def result_directory(run: Path) -> Path:
    """Return the directory of the results of a run's tasks; from now on they may be read there."""
    directory = run.resolve() / "prefect_results"
    _directories.add(directory)
    return directory


def forget_results(run: Path) -> None:
    """Remove a run's stored results; for when a checkpoint covers all stages that have some."""
    for path in result_directory(run).glob("*"):
        if _RESULT.fullmatch(path.name) and is_regular(path):
            path.unlink(missing_ok=True)


def check_answer(url: str, content: bytes) -> None:
    """Raise `EarlError` when a server's answer holds a state with a result."""
    try:
        answer = json.loads(content) if content else None
    except ValueError:
        return
    for state in _states_with_data(answer):
        raise EarlError(
            f"the Prefect server handed out a result with the state {state} (at {url}), which EARL "
            "never stores there: use a server of your own, or unset PREFECT_API_URL"
        )


def _states_with_data(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("data") is not None and value.get("type") in _STATES:
            yield str(value["type"])
        if value.get("default_result_storage_block_id") is not None:
            yield "of its default storage"
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _states_with_data(item)


def _read_record(cls: Any, data: bytes, backup_serializer: Any = None) -> ResultRecord[Any]:
    """`ResultRecord.deserialize`, for what `SERIALIZER` wrote only."""
    try:
        stored = json.loads(data)
        named, text = stored["metadata"]["serializer"], stored["result"]
        if named == SERIALIZER.model_dump() and isinstance(text, str):
            record: ResultRecord[Any] = ResultRecord.model_validate(stored)
            record.result = json.loads(text)
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise EarlError("a stored result is not the plain JSON that EARL writes: it is not read")


def _refuse(cls: Any, result: bytes, metadata: bytes) -> ResultRecord[Any]:
    raise EarlError("a result beside its metadata is not what EARL writes: it is not read")


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def read(self: ResultStore, key: str, *given: Any, **named: Any) -> Any:
        place = _place(self)
        if place is None or not (place / key).resolve().is_relative_to(place):
            raise EarlError(f"the result {key!r} is not stored in a run that is open here")
        return method(self, key, *given, **named)

    return read


def _place(store: ResultStore) -> Path | None:
    """The result directory of an open run, where a store has its results; None for others."""
    storage = store.result_storage
    if type(storage) is not LocalFileSystem or storage.basepath is None:
        return None
    place = Path(storage.basepath)
    return place if place in _directories else None


def _kept(method: Callable[..., Any]) -> Callable[..., Any]:
    """Prefect pickles the exception of every failed flow into its home; nobody would read it."""

    @wraps(method)
    async def awrite(self: ResultStore, *given: Any, **named: Any) -> None:
        if _place(self) is not None:
            await method(self, *given, **named)

    @wraps(method)
    def write(self: ResultStore, *given: Any, **named: Any) -> None:
        if _place(self) is not None:
            method(self, *given, **named)

    return awrite if inspect.iscoroutinefunction(method) else write


_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_first_owners: dict[int, set[int]] = {}


def check_listener(url: str) -> None:
    """Raise `EarlError` where other users listen at a plain loopback address than at first."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "ws") or parts.hostname not in _LOOPBACK:
        return
    port = parts.port or 80
    owners = owners_of(port)
    if owners and owners != _first_owners.setdefault(port, owners):
        raise EarlError(
            f"another user listens at port {port} now, where the Prefect server of {url} was: it "
            "is told nothing; start your server anew, with another password"
        )


class _Connect(websockets.connect):
    """A web socket that looks who listens, also when it connects again."""

    async def create_connection(self) -> Any:
        check_listener(self.uri)
        return await super().create_connection()


def ask_first_listeners() -> None:
    """Have the clients of this process look who listens before each request."""
    if websockets.connect is _Connect:
        return
    websockets.connect = _Connect  # type: ignore[misc]
    # What sends each attempt of a request, and each redirection; Prefect asks for the server's
    # version, with the password, by a client that is none of its own.
    for client in (httpx.AsyncClient, httpx.Client):
        client._send_single_request = _looking(client._send_single_request)  # type: ignore[method-assign]


def _looking(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def sent(self: Any, request: httpx.Request) -> Any:
        check_listener(str(request.url))
        return send(self, request)

    return sent


def _async_send(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    async def checked(self: Any, request: httpx.Request, *given: Any, **named: Any) -> Any:
        response = await send(self, request, *given, **named)
        check_answer(str(request.url), await response.aread())
        return response

    return checked


def _sync_send(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def checked(self: Any, request: httpx.Request, *given: Any, **named: Any) -> Any:
        response = send(self, request, *given, **named)
        check_answer(str(request.url), response.read())
        return response

    return checked


def distrust_servers() -> None:
    """Put the checks in place, for all of this process; before the first flow."""
    if getattr(ResultRecord.deserialize, "__func__", None) is _read_record:
        return
    ask_first_listeners()
    base.PrefectHttpxAsyncClient.send = _async_send(base.PrefectHttpxAsyncClient.send)  # type: ignore[method-assign]
    base.PrefectHttpxSyncClient.send = _sync_send(base.PrefectHttpxSyncClient.send)  # type: ignore[method-assign]
    ResultRecord.deserialize = classmethod(_read_record)  # type: ignore[method-assign,assignment]
    ResultRecord.deserialize_from_result_and_metadata = classmethod(_refuse)  # type: ignore[method-assign,assignment]
    for name in ("read", "aread", "exists", "aexists"):
        setattr(ResultStore, name, _checked(getattr(ResultStore, name)))
    for name in ("persist_result_record", "apersist_result_record"):
        setattr(ResultStore, name, _kept(getattr(ResultStore, name)))

"""The HTTP server of a rollout worker, on loopback: agents ask it for the policy's answers.

`POST /SESSION/v1/chat/completions`, `POST /SESSION/inference/v1/generate` (token ids) and
`GET /SESSION/v1/models`. The key of a session is its episode's
secret; a request without it is refused before its body is read. What the engine raises ends the
rollout, not only the request that met it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from earl_core.environments.agent import MODEL, OPPONENT
from earl_core.rollout.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway import chat_completions, generate
from earl_core.rollout.gateway.session import ERROR_CODE, Answer, Locate, Session, refused
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import EpisodeSpec

_MOST_BYTES = 64 << 20
_BACKLOG = 4096
_IDLE_SECONDS = 3600
"""A connection is kept: an agent may be long with a tool, and its client need not ask again when a
request meets the end of its connection."""
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.003, 0.25, 0.1
"""A lockstep engine begins when no request came for this share of the last batch's seconds, between
these: a batch takes hardly longer than one answer, and agents ask one after the other."""


_STANDING_BRANCHES = 256
_STANDING_SECONDS = 0.25


class _Request(Protocol):
    @property
    def model(self) -> str: ...

    @property
    def max_tokens(self) -> int | None: ...


Asked = TypeVar("Asked", bound=_Request)


class Gateway:
    """Sessions in front of one engine. An asynchronous context manager; all of it belongs to one
    event loop.

    port: on 127.0.0.1; 0: a free one. askers: how many may ask now, for a lockstep engine, whose
    batch then waits for all of them, but `patience` seconds at most; None: nobody knows. failed:
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
        self._askers, self._patience = askers, patience
        self._engine, self._chat, self._settings, self._meter = engine, chat, settings, meter
        self._sessions: dict[str, Session] = {}
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._answering: asyncio.Task[None] | None = None
        self._pause = _SHORTEST_PAUSE
        self._stood = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Gateway:
        self._socket = socket.create_server(("127.0.0.1", self._port), backlog=_BACKLOG)
        routes = []
        for session in ("/{session}", ""):
            routes += [
                Route(f"{session}/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route(f"{session}/inference/v1/generate", self._generate_tokens, methods=["POST"]),
                Route(f"{session}/v1/models", self._models),
            ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={HTTPException: _refusal}),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=_IDLE_SECONDS,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        self._socket.close()
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait({self._answering})

    def open(self, spec: EpisodeSpec, trained: bool = True) -> Session:
        """A new session of an episode. trained: see `Session`."""
        longest = self._engine.max_model_len
        session = Session(spec, self._chat, self._settings, self._meter, longest, trained)
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
                standing = self.open(EpisodeSpec(self._stood, 0, 0, seed))
                self._stood += 1
                standing.key, self._sessions[""] = key, standing
            for session in [each for each in left if not each.busy]:
                left.remove(session)
                await self.close(session)
            await asyncio.wait({self.failed}, timeout=_STANDING_SECONDS)
            if self.failed.done():
                self.failed.result()

    async def close(self, session: Session) -> None:
        """Free what the engine holds of a session that is over."""
        del self._sessions[session.name]
        await self._engine.cancel(session.sequence_ids)
        self._engine.finish(session.sequence_ids)

    def base_url(self, session: Session) -> str:
        """What an agent's client takes as its `base_url`."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/{session.name}/v1"

    def address(self, session: Session) -> dict[str, str]:
        """What an agent, or an environment, is told."""
        return {"base_url": self.base_url(session), "api_key": session.key}

    async def _models(self, request: Request) -> Response:
        self._session(request)
        about = {"object": "model", "created": 0, "owned_by": "earl"}
        models = [{"id": name, **about} for name in (MODEL, OPPONENT)]
        return JSONResponse({"object": "list", "data": models})

    async def _chat_completions(self, request: Request) -> Response:
        def read(body: Any) -> tuple[chat_completions.ChatRequest, Locate]:
            asked = chat_completions.parse(body)
            return asked, lambda branches: branches.prompt(asked.messages, asked.tools)

        asked, answer, name = await self._answered(request, read)
        if asked.stream:
            parts = chat_completions.events(asked, answer, name)
            return StreamingResponse(parts, media_type="text/event-stream")
        return JSONResponse(chat_completions.reply(asked, answer, name))

    async def _generate_tokens(self, request: Request) -> Response:
        def read(body: Any) -> tuple[generate.GenerateRequest, Locate]:
            asked = generate.parse(body, self._chat.vocabulary)
            return asked, lambda branches: branches.prompt_tokens(asked.token_ids)

        return JSONResponse(generate.reply(*await self._answered(request, read)))

    async def _answered(
        self, request: Request, read: Callable[[Any], tuple[Asked, Locate]]
    ) -> tuple[Asked, Answer, str]:
        """The request, its answer, and a name for that."""
        try:
            session = self._session(request)
            asked, locate = read(await _body(request))
            answering = session.complete(
                locate, asked.max_tokens, self._generate, asked.model == OPPONENT
            )
            answer = await self._unless_gone(request, answering)
        except HTTPException:
            raise
        except ClientDisconnect:
            raise refused(499, "client_gone", "the client went away") from None
        except Exception as error:
            # The agent's own deadline, or the rollout's end, comes next.
            if not self.failed.done():
                self.failed.set_exception(error)
            raise refused(500, "rollout_failed", "the rollout has failed") from error
        return asked, answer, f"{session.name}-{secrets.token_hex(4)}"

    def _session(self, request: Request) -> Session:
        """The session that the request may use."""
        session = self._sessions.get(request.path_params.get("session", ""))
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if session is None or not secrets.compare_digest(given, session.key.encode()):
            raise refused(401, "invalid_api_key", "no session of a running episode has it")
        return session

    async def _unless_gone(
        self, request: Request, answering: Coroutine[Any, Any, Answer]
    ) -> Answer:
        """The answer; when the client goes away before it, or its time is over, the request has not
        been."""
        limit = self._settings.call_seconds
        answer = asyncio.ensure_future(answering)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answer, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise ClientDisconnect
            self._meter.calls_timed_out += 1
            told = f"the answer took over {limit:g} s (environment.call_timeout_seconds)"
            # Not 408 or 504, after which clients ask again.
            raise refused(400, "call_timeout", told)
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.wait({answer, gone})

    async def _generate(self, request: GenerationRequest) -> Completion:
        self._meter.requests_running(1)
        started = time.perf_counter()
        try:
            if self._engine.lockstep:
                return await self._together(request)
            (completion,) = await self._engine.generate([request])
            return completion
        finally:
            self._meter.requests_running(-1)
            self._meter.generation_wait += time.perf_counter() - started

    async def _together(self, request: GenerationRequest) -> Completion:
        """An answer of an engine that wants whole batches: of all requests that wait."""
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, reply))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_waiting())
        try:
            return await reply
        except asyncio.CancelledError:
            await self._engine.cancel([request.sequence_id])
            raise

    async def _answer_waiting(self) -> None:
        while self._waiting:
            await self._gather()
            batch = [each for each in self._waiting if not each[1].done()]
            # An order that is not that of arrival.
            batch.sort(key=lambda each: each[0].sequence_id)
            self._waiting.clear()
            if not batch:
                continue
            began = time.perf_counter()
            try:
                completions = await self._engine.generate([request for request, _ in batch])
            except Exception as error:
                for _, reply in batch:
                    if not reply.done():
                        reply.set_exception(error)
                continue
            pause = _PAUSE_SHARE * (time.perf_counter() - began)
            self._pause = min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            for (_, reply), completion in zip(batch, completions, strict=True):
                if not reply.done():
                    reply.set_result(completion)

    async def _gather(self) -> None:
        """Wait for the requests that come at the same time."""
        if self._askers is not None:
            over = time.monotonic() + self._patience
            while len(self._waiting) < self._askers() and time.monotonic() < over:
                await asyncio.sleep(_SHORTEST_PAUSE)
            return
        seen = 0
        while seen != len(self._waiting):
            seen = len(self._waiting)
            await asyncio.sleep(self._pause)


class _Server(uvicorn.Server):
    """A server in a process whose signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


async def _body(request: Request) -> Any:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise refused(413, "too_large", f"a request has at most {_MOST_BYTES:,} bytes")
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise refused(400, "invalid_json", f"the body is no JSON: {error}") from error


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = (error.headers or {}).get(ERROR_CODE, "not_found")
    body = chat_completions.error_body(error.status_code, code, error.detail)
    return JSONResponse(body, error.status_code, error.headers)

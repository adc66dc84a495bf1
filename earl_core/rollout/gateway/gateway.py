"""The HTTP server of a rollout worker, on loopback: agents ask it for the policy's answers.

`POST /SESSION/v1/chat/completions`, `POST /SESSION/inference/v1/generate` (token ids) and `GET
/SESSION/v1/models`. The key of a session is its episode's secret; a request without it is refused
before its body is read. An error of the engine ends the rollout, not only the request that met it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from earl_core.environments.agent import MODEL, OPPONENT
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway import chat_completions, generate
from earl_core.rollout.gateway.aside import LARGE, Aside
from earl_core.rollout.gateway.batches import Batches
from earl_core.rollout.gateway.bodies import parse_body, read_body
from earl_core.rollout.gateway.pending import Growth, PendingAnswer
from earl_core.rollout.gateway.refusals import ERROR_CODE, invalid, refused
from earl_core.rollout.gateway.session import Answer, Call, Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.trajectory.samples import EpisodeSpec

_BACKLOG = 4096
_IDLE_SECONDS = 3600
"""A connection is kept: an agent may be long with a tool, and its client need not ask again when a
request meets the end of its connection."""
_between: list[socket.socket] = []
"""Sockets that listen for no gateway at the moment, until the process ends: an agent that goes on
after its rollout must not ask whoever takes its gateway's port, and do as he answers."""
_ENDPOINTS = "POST .../v1/chat/completions, POST .../inference/v1/generate and GET .../v1/models"
_STANDING_BRANCHES = 256
_STANDING_SECONDS = 0.25
_PIECE_SECONDS = 0.1
"""Seconds between two pieces of an answer that is streamed."""

Asked = TypeVar("Asked")


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
        self._aside = Aside(chat)
        self._stood = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Gateway:
        if self._port or not _between:
            self._socket = socket.create_server(("127.0.0.1", self._port), backlog=_BACKLOG)
        else:
            self._socket = _between.pop()
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
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket.dup()]))
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        if self._port:
            self._socket.close()
        else:
            _between.append(self._socket)
        await self._batches.close()
        self._aside.close()

    def open(self, spec: EpisodeSpec, trained: bool = True) -> Session:
        """A new session of an episode. trained: see `Session`."""
        longest = self._engine.max_model_len
        settings, meter = self._settings, self._meter
        session = Session(spec, self._chat, settings, meter, longest, self._aside, trained)
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
        """Return the address that an agent's client takes as its `base_url`."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/{session.name}/v1"

    def address(self, session: Session) -> dict[str, str]:
        """Return the address and the key for an agent, or an environment."""
        return {"base_url": self.base_url(session), "api_key": session.key}

    async def _models(self, request: Request) -> Response:
        self._session(request)
        about = {"object": "model", "created": 0, "owned_by": "earl"}
        models = [{"id": name, **about} for name in (MODEL, OPPONENT)]
        return JSONResponse({"object": "list", "data": models})

    async def _chat_completions(self, request: Request) -> Response:
        with self._watched():
            session = self._session(request)
            asked = await self._parsed(request, session, chat_completions.parse)
            growth = Growth(self._chat)
            # With tools the text is known at the end, when it is known what are calls.
            grows = asked.stream and not asked.tools and not self._engine.lockstep
            call = Call(
                lambda branches: branches.place(asked.messages, asked.tools),
                asked.max_tokens,
                asked.model == OPPONENT,
                asked.characters,
                growth.add if grows else None,
                texts=[*(each["content"] for each in asked.messages), asked.tools.key],
            )
            pending = self._pending(session, call)
            answer = await self._begun(request, pending, growth if grows else None)
            if asked.stream:
                chunks = chat_completions.Chunks(asked, _named(session))
                parts = self._pieces(pending, growth, chunks)
                return StreamingResponse(parts, media_type="text/event-stream")
            assert answer is not None
            return JSONResponse(chat_completions.reply(asked, answer, _named(session)))

    async def _generate_tokens(self, request: Request) -> Response:
        with self._watched():
            session = self._session(request)
            vocabulary = self._chat.vocabulary
            asked = await self._parsed(
                request, session, lambda body: generate.parse(body, vocabulary)
            )
            call = Call(
                lambda branches: branches.place_tokens(asked.token_ids),
                asked.max_tokens,
                asked.model == OPPONENT,
                tokens=len(asked.token_ids),
            )
            answer = await self._begun(request, self._pending(session, call), None)
            assert answer is not None
            return JSONResponse(generate.reply(asked, answer, _named(session)))

    async def _parsed(
        self, request: Request, session: Session, parse: Callable[[Any], Asked]
    ) -> Asked:
        """Parse the request; large bodies are parsed beside the event loop."""
        content = await read_body(request, session.most_bytes)
        if content is None:
            raise session.too_long(
                f"the request has over {session.most_bytes:,} bytes, more than the model's context "
                "can hold"
            )

        def read() -> Asked:
            body = parse_body(content)
            session.check_tools(body)
            return parse(body)

        return read() if len(content) < LARGE else await self._aside.run(read)

    def _pending(self, session: Session, call: Call) -> PendingAnswer:
        answering = session.complete(call, self._generate)
        return PendingAnswer(answering, self._settings.call_seconds, self._meter)

    async def _begun(
        self, request: Request, pending: PendingAnswer, growth: Growth | None
    ) -> Answer | None:
        """The answer, or None when it has begun to grow; when the client goes away before, the
        request has not been."""
        gone = asyncio.ensure_future(_gone(request))
        begun = False
        try:
            seconds = None if growth is None else _PIECE_SECONDS
            while (answer := await pending.wait(seconds, gone)) is None:
                if gone.done():
                    raise ClientDisconnect
                if growth is not None and growth.begun:
                    break
            begun = True
            return answer
        finally:
            gone.cancel()
            if not begun:
                await pending.give_up()

    async def _pieces(
        self, pending: PendingAnswer, growth: Growth, chunks: chat_completions.Chunks
    ) -> AsyncIterator[str]:
        """The events of an answer, as it grows. Where nobody reads on, the request has not been."""
        try:
            with self._watched():
                while (answer := await pending.wait(_PIECE_SECONDS)) is None:
                    if piece := growth.piece():
                        yield chunks.piece(piece)
                for event in chunks.end(answer, growth.sent):
                    yield event
        except HTTPException as error:
            await pending.give_up()
            yield chunks.error(_refusal_body(error))
        finally:
            await pending.give_up()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """End the rollout by an error that is raised here and is no refusal."""
        try:
            yield
        except HTTPException:
            raise
        except ClientDisconnect:
            raise refused(499, "client_gone", "the client went away") from None
        except RecursionError as error:
            # JSON that can be read may still be too deep to check or to render.
            raise invalid("its tools or calls are nested too deeply") from error
        except Exception as error:
            # The agent's own deadline, or the rollout's end, comes next.
            if not self.failed.done():
                self.failed.set_exception(error)
            raise refused(500, "rollout_failed", "the rollout has failed") from error

    def _session(self, request: Request) -> Session:
        """The session that the request may use."""
        session = self._sessions.get(request.path_params.get("session", ""))
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if session is None or not secrets.compare_digest(given, session.key.encode()):
            raise refused(401, "invalid_api_key", "no session of a running episode has it")
        return session

    async def _generate(self, request: GenerationRequest) -> Completion:
        self._meter.requests_running(1)
        started = time.perf_counter()
        try:
            if self._engine.lockstep:
                return await self._batches.ask(request)
            (completion,) = await self._engine.generate([request])
            return completion
        finally:
            self._meter.requests_running(-1)
            self._meter.generation_wait += time.perf_counter() - started


class _Server(uvicorn.Server):
    """A server in a process whose signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _named(session: Session) -> str:
    """A name for an answer."""
    return f"{session.name}-{secrets.token_hex(4)}"


def _refusal_body(error: HTTPException) -> dict[str, Any]:
    code, told = (error.headers or {}).get(ERROR_CODE), error.detail
    if code is None:
        code, told = "not_found", f"{told}: there is nothing but {_ENDPOINTS}"
    return chat_completions.error_body(error.status_code, code, told)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_refusal_body(error), error.status_code, error.headers)

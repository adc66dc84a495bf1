"""The endpoints of a gateway: a request is read, given to its session, and answered in its API.

An error of the engine ends the rollout, not only the request that met it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from earl_core.environments.agent import MODEL, OPPONENT, episode_result
from earl_core.environments.rewards.results import step_result
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway import chat_completions, generate, messages, responses
from earl_core.rollout.gateway.aside import LARGE, Aside
from earl_core.rollout.gateway.batches import Batches
from earl_core.rollout.gateway.bodies import parse_body, parse_unique, read_body
from earl_core.rollout.gateway.call import Answer, Call
from earl_core.rollout.gateway.chat_request import ChatRequest, Reading, assistant
from earl_core.rollout.gateway.credit import role_of
from earl_core.rollout.gateway.pending import Growth, PendingAnswer
from earl_core.rollout.gateway.refusals import ERROR_CODE, invalid, refused
from earl_core.rollout.gateway.session import Session
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.frames import WireError

_ENDPOINTS = (
    "POST .../v1/chat/completions, POST .../v1/responses, POST .../v1/messages, "
    "POST .../inference/v1/generate, POST .../v1/reward, GET .../v1/models and "
    "GET .../v1/models/policy"
)
_PIECE_SECONDS = 0.1
"""Seconds between two pieces of an answer that is streamed."""
_MODELS = (MODEL, OPPONENT)

Asked = TypeVar("Asked")


class Endpoints:
    """sessions: by name, "" for the one that stands. failed: gets what ends the rollout."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        sessions: Mapping[str, Session],
        batches: Batches,
        aside: Aside,
        failed: asyncio.Future[None],
    ) -> None:
        self._engine, self._chat, self._settings, self._meter = engine, chat, settings, meter
        self._sessions, self._batches, self._aside = sessions, batches, aside
        self._failed = failed

    @property
    def routes(self) -> list[Route]:
        """The routes, with a session's name in front and without."""
        routes = []
        for session in ("/{session}", ""):
            answered = {
                f"{session}/v1/chat/completions": chat_completions,
                f"{session}/v1/responses": responses,
                f"{session}/v1/messages": messages,
                # Anthropic's clients add /v1 to their base URL.
                f"{session}/v1/v1/messages": messages,
            }
            routes += [
                Route(path, self._answering(api), methods=["POST"])
                for path, api in answered.items()
            ]
            routes += [
                Route(f"{session}/inference/v1/generate", self._generate_tokens, methods=["POST"]),
                Route(f"{session}/v1/reward", self._take_reward, methods=["POST"]),
                Route(f"{session}/v1/models", self._list_models),
                Route(f"{session}/v1/models/{{model}}", self._model),
            ]
        return routes

    async def _take_reward(self, request: Request) -> Response:
        session = self._session(request)
        if not session.awaits_reward:
            # Whoever reads the key, a command of the policy's too, could end the episode by it.
            told = "the episode's reward is not posted: set environment.options.reward to posted"
            raise refused(409, "reward_not_awaited", told)
        value = await self._parsed(request, session, lambda body: body, parse_unique)
        if session.posted is not None:
            raise refused(409, "reward_posted", "the episode has its reward already")
        try:
            result = step_result(episode_result(value))
            session.credit.check(result["info"])
        except (WireError, ValueError) as error:
            raise invalid(str(error)) from error
        session.posted = result
        return JSONResponse({"object": "reward"})

    async def _list_models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"object": "list", "data": [_about(name) for name in _MODELS]})

    async def _model(self, request: Request) -> Response:
        self._session(request)
        name = request.path_params["model"]
        if name not in _MODELS:
            raise refused(404, "model_not_found", f"the models are {' and '.join(_MODELS)}")
        return JSONResponse(_about(name))

    def _answering(self, api: ModuleType) -> Callable[[Request], Any]:
        """Make the endpoint of an API: a module with `parse`, `reply` and `Chunks`."""

        async def endpoint(request: Request) -> Response:
            with self._watched():
                return await self._answered(request, api)

        return endpoint

    async def _answered(self, request: Request, api: ModuleType) -> Response:
        session = self._session(request)
        reading = self._reading(session)
        asked: ChatRequest = await self._parsed(
            request, session, lambda body: api.parse(body, reading)
        )
        growth = Growth(self._chat, max(map(len, asked.stop), default=1) - 1)
        # With tools the text is known at the end, when it is known what are calls.
        grows = asked.stream and not (asked.tools or asked.opening or self._engine.lockstep)
        grows = grows and asked.count == 1 and not self._reasons_first(asked)
        name, role = _named(session), role_of(request)
        call = Call(
            lambda branches: branches.place(asked.messages, asked.tools, asked.opening, role),
            asked.max_tokens,
            asked.model == OPPONENT,
            asked.characters,
            growth.add if grows else None,
            texts=asked.texts,
            count=asked.count,
            stop_token_ids=asked.stop_token_ids,
            stop=asked.stop,
            constraints=asked.constraints,
            tools=asked.tools,
            token_texts=asked.logprobs,
            top=asked.top,
            name=name,
        )
        pending = self._pending(session, call)
        answers = await self._begun(request, pending, growth if grows else None)
        if answers is not None:
            _remember(session, asked, answers, name)
        if asked.stream:
            parts = self._pieces(session, pending, growth, asked, api.Chunks(asked, name), name)
            return StreamingResponse(parts, media_type="text/event-stream")
        assert answers is not None
        return JSONResponse(api.reply(asked, answers, name))

    async def _generate_tokens(self, request: Request) -> Response:
        with self._watched():
            session = self._session(request)
            reading = self._reading(session)
            asked = await self._parsed(
                request, session, lambda body: generate.parse(body, reading.vocabulary)
            )
            name, role = _named(session), role_of(request)
            call = Call(
                lambda branches: branches.place_tokens(asked.token_ids, role),
                asked.max_tokens,
                asked.model == OPPONENT,
                tokens=len(asked.token_ids),
                stop_token_ids=asked.stop_token_ids,
                stop=asked.stop,
                name=name,
            )
            answers = await self._begun(request, self._pending(session, call), None)
            assert answers is not None
            return JSONResponse(generate.reply(asked, answers[0], name))

    def _reading(self, session: Session) -> Reading:
        chat = self._chat
        return Reading(
            chat.template_options,
            chat.vocabulary,
            self._settings.constrained,
            session.conversations.get,
        )

    async def _parsed(
        self,
        request: Request,
        session: Session,
        parse: Callable[[Any], Asked],
        load: Callable[[bytes], Any] = parse_body,
    ) -> Asked:
        """Parse the request; large bodies are parsed beside the event loop. load: its JSON."""
        content = await read_body(request, session.most_bytes)
        if content is None:
            raise session.too_long(
                f"the request has over {session.most_bytes:,} bytes, more than the model's context "
                "can hold"
            )

        def read() -> Asked:
            body = load(content)
            try:
                session.check_tools(body)
                return parse(body)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                # A value of a form that no reader of a field has thought of is the client's.
                raise invalid(f"the request cannot be read: {error}") from error

        return read() if len(content) < LARGE else await self._aside.run(read)

    def _reasons_first(self, asked: ChatRequest) -> bool:
        """Whether the text may come after reasoning that is not part of it."""
        shaped = any(each.shape is not None for each in asked.constraints)
        return shaped and self._settings.grammars is not None and self._chat.reasons

    def _pending(self, session: Session, call: Call) -> PendingAnswer:
        answering = session.complete(call, partial(self._generate, session))
        return PendingAnswer(answering, self._settings, self._meter)

    async def _begun(
        self, request: Request, pending: PendingAnswer, growth: Growth | None
    ) -> Sequence[Answer] | None:
        """The answers, or None when one has begun to grow; when the client goes away before, the
        request has not been."""
        gone = asyncio.ensure_future(_gone(request))
        begun = False
        try:
            seconds = None if growth is None else _PIECE_SECONDS
            while (answers := await pending.wait(seconds, gone)) is None:
                if gone.done():
                    raise ClientDisconnect
                if growth is not None and growth.begun:
                    break
            begun = True
            return answers
        finally:
            gone.cancel()
            if not begun:
                await pending.give_up()

    async def _pieces(
        self,
        session: Session,
        pending: PendingAnswer,
        growth: Growth,
        asked: ChatRequest,
        chunks: Any,
        name: str,
    ) -> AsyncIterator[str]:
        """The events of an answer, as it grows. Where nobody reads on, the request has not been.

        chunks: the API's."""
        try:
            with self._watched():
                while (answers := await pending.wait(_PIECE_SECONDS)) is None:
                    if piece := growth.piece():
                        yield chunks.piece(piece)
                _remember(session, asked, answers, name)
                for event in chunks.end(answers, growth.sent):
                    yield event
        except HTTPException as error:
            await pending.give_up()
            yield chunks.error(_told(error, chunks))
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
            if not self._failed.done():
                self._failed.set_exception(error)
            raise refused(500, "rollout_failed", "the rollout has failed") from error

    def _session(self, request: Request) -> Session:
        """The session that the request may use."""
        session = self._sessions.get(request.path_params.get("session", ""))
        own = session.key if session is not None else ""
        if not own or not any(
            secrets.compare_digest(key.encode(), own.encode()) for key in _keys(request)
        ):
            raise refused(401, "invalid_api_key", "no session of a running episode has it")
        assert session is not None
        return session

    async def _generate(self, session: Session, request: GenerationRequest) -> Completion:
        self._meter.requests_running(1)
        started = self._settings.clock()
        try:
            if self._engine.lockstep:
                return await self._batches.ask(request, session.name)
            (completion,) = await self._engine.generate([request])
            return completion
        finally:
            self._meter.requests_running(-1)
            self._meter.generation_wait += self._settings.clock() - started


async def refusal(request: Request, error: Exception) -> Response:
    """The reply that a refusal makes, in the form of its API."""
    assert isinstance(error, HTTPException)
    api = messages if request.url.path.endswith("/messages") else chat_completions
    return JSONResponse(_told(error, api), error.status_code, error.headers)


def _told(error: HTTPException, api: Any) -> dict[str, Any]:
    code, told = (error.headers or {}).get(ERROR_CODE), error.detail
    if code is None:
        code, told = "not_found", f"{told}: there is nothing but {_ENDPOINTS}"
    body: dict[str, Any] = api.error_body(error.status_code, code, told)
    return body


def _remember(session: Session, asked: ChatRequest, answers: Sequence[Answer], name: str) -> None:
    """Have later requests go on after the answer, where they may name it."""
    if asked.kept is not None:
        answer = answers[0].message
        said = assistant(answer["content"], answer.get("tool_calls", ()))
        session.conversations[responses.ID + name] = [*asked.kept, said]


def _keys(request: Request) -> Iterator[str]:
    """The keys that a request carries: OpenAI's form, whose word may be small, Azure's and
    Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    for name in ("api-key", "x-api-key"):
        if name in request.headers:
            yield request.headers[name]


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _about(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "earl"}


def _named(session: Session) -> str:
    """A name for an answer."""
    return f"{session.name}-{secrets.token_hex(4)}"

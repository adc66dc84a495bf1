"""A request to a session, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from earl_core.environments.base import Message
from earl_core.rollout.chat.token_texts import TokenText
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.engines.engine import Completion, GenerationRequest, OnTokens
from earl_core.rollout.gateway.branches import Branches
from earl_core.rollout.gateway.constraints import Constraint
from earl_core.rollout.gateway.placing import Placing

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
Locate = Callable[[Branches], Placing]


@dataclass(frozen=True)
class Call:
    """A request. locate: chooses the place of an answer among the branches. opponent: on that side,
    which is recorded nowhere. on_tokens: see `GenerationRequest`. characters: of all that the
    template may render. tokens: of a client that renders itself. texts: the longest of what is
    rendered. count: answers. stop_token_ids: besides the model's own.
    stop: strings that end the answer, which is cut before them. constraints: on the form of
    the answer. tools: of the conversation. token_texts: whether the answer has them. top: see
    `GenerationRequest`. name: of the reply."""

    locate: Locate
    max_tokens: int | None
    opponent: bool = False
    characters: int = 0
    on_tokens: OnTokens | None = None
    tokens: int = 0
    texts: Sequence[str] = ()
    count: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop: Sequence[str] = ()
    constraints: Sequence[Constraint] = ()
    tools: Tools = NO_TOOLS
    token_texts: bool = False
    top: int = 0
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a request. finish_reason: stop, length or tool_calls. texts: of its tokens.
    top: the most likely tokens beside each.
    stopped_by: the string that ended it. reasoning: that came before the text of the message and is
    not in it."""

    message: Message
    finish_reason: str
    prompt: list[int]
    completion: Completion
    texts: Sequence[TokenText] = ()
    top: Sequence[Sequence[tuple[TokenText, float]]] = ()
    stopped_by: str = ""
    reasoning: str | None = None


async def all_of(generate: Generate, requests: Sequence[GenerationRequest]) -> Sequence[Completion]:
    """All completions; when one fails, or this is cancelled, the others are given up."""
    if len(requests) == 1:
        return [await generate(requests[0])]
    tasks = [asyncio.ensure_future(generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

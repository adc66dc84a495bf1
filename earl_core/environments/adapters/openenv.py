"""Adapter for environments of OpenEnv: a class, hosted here unchanged, or a server by its URL.

Each answer of the model is one action, as JSON. An answer that the class of the actions does not
accept is told to the model, which may try again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import field
from typing import Any, ClassVar

from earl_core.environments.adapters.fenced import unfenced
from earl_core.environments.adapters.openenv_sessions import (
    Hosted,
    Invalid,
    Observed,
    Remote,
    Session,
)
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options, at_least

_MCP = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the schemas of environments whose actions are calls of tools."""


class OpenEnvOptions(Options):
    """Options of the OpenEnv adapter.

    url: URL of a server; an episode is a session there.
    token: bearer token for the server, as a reference: env:NAME or file:PATH.
    environment: instead of a url: import path of a subclass of Environment.
    action: import path of the class of its actions, with an environment.
    options: arguments of the environment's constructor.
    reset: arguments of reset, beside seed and index.
    tasks: number of tasks, for environments with a data set: reset also gets index, the prompt's
        number modulo this.
    instructions: text of the first message in place of the actions' JSON schema.
    allowed_errors: invalid actions forgiven per turn before the episode ends.
    illegal_reward: reward of an invalid answer that ends the episode.
    """

    url: str | None = None
    token: str | None = None
    environment: str = ""
    action: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    reset: dict[str, Any] = field(default_factory=dict)
    tasks: int | None = None
    instructions: str | None = None
    allowed_errors: int = 2
    illegal_reward: float = -1.0

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: begin it with http:// or https://")
        hosted = [self.environment, self.action]
        if (any(hosted) or self.options) if self.url else not all(hosted):
            raise ValueError("give either url, or environment and action, both import paths")
        if self.token and not self.url:
            raise ValueError("a token is for a url: give that, or drop it")
        at_least("allowed_errors", self.allowed_errors, 0)
        if self.tasks is not None:
            at_least("tasks", self.tasks, 1)


class OpenEnv:
    """One session. The prompt index fixes the seed that the environment's reset gets.

    `info` at the end: `outcome` (done, or illegal after too many invalid actions in one turn) and
    the metric `invalid_actions`.
    """

    options_model: ClassVar[type[OpenEnvOptions]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions) -> None:
        self.options = options
        self._session: Session
        if options.url:
            self._session = Remote(options.url, options.token)
        else:
            self._session = Hosted(options.environment, options.action, options.options)
        self.concurrent = self._session.concurrent
        self.deterministic = self._session.deterministic
        self._errors = self._errors_in_turn = 0
        methods: list[Any] = [self._reset, self._step, self._session.close]
        if not self._session.waits:
            methods = [_plain(method) for method in methods]
        self.reset, self.step, self.close = methods

    async def _reset(self, prompt: int, seed: int) -> list[Message]:
        arguments = {**self.options.reset, "seed": _seed(prompt)}
        if self.options.tasks is not None:
            arguments["index"] = prompt % self.options.tasks
        observed = await self._session.reset(arguments)
        told = self.options.instructions
        if told is None:
            told = await self._described()
        return [{"role": "user", "content": f"{_shown(observed)}\n\n{told}".strip()}]

    async def _step(self, text: str) -> StepResult:
        try:
            observed = await self._session.step(_action(text, self._session.schema))
        except Invalid as error:
            return self._told(error)
        self._errors_in_turn = 0
        info = self._info("done") if observed.done else {}
        message: Message = {"role": "user", "content": _shown(observed)}
        return StepResult([message], observed.reward, observed.done, info)

    def _told(self, error: Invalid) -> StepResult:
        self._errors += 1
        self._errors_in_turn += 1
        message: Message = {"role": "user", "content": f"That is no valid action: {error}"}
        if self._errors_in_turn > self.options.allowed_errors:
            return StepResult([message], self.options.illegal_reward, True, self._info("illegal"))
        return StepResult([message], 0.0, False)

    def _info(self, outcome: str) -> dict[str, Any]:
        metrics = {"invalid_actions": self._errors}
        return {"outcome": outcome, "outcomes": ["done", "illegal"], "metrics": metrics}

    async def _described(self) -> str:
        """Describe the actions to the model."""
        schema = self._session.schema
        if schema.get("title") in _MCP:
            listed = await self._session.step({"type": "list_tools"})
            tools = json.dumps(_without_nothing(listed.fields["tools"]), ensure_ascii=False)
            call = '{"type": "call_tool", "tool_name": NAME, "arguments": {...}}'
            return f"Answer with one JSON object, {call}, that calls one of these tools:\n{tools}"
        known = {name: kind for name, kind in _properties(schema).items() if name != "metadata"}
        shown = json.dumps({**schema, "properties": known}, ensure_ascii=False)
        alone = _only_field(schema)
        also = f", or the value of {alone} alone" if alone else ""
        return f"Answer with one JSON object of this schema{also}:\n{shown}"


def _plain(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """A coroutine function that waits for nothing as a plain one, which runs in a thread."""

    def run(*arguments: Any) -> Any:
        try:
            method(*arguments).send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError("it waits for something")

    return run


def _seed(prompt: int) -> int:
    """Below 2**31, which is what most generators take; held-out prompts have others."""
    return int.from_bytes(hashlib.sha256(f"openenv/{prompt}".encode()).digest()[:4], "big") >> 1


def _action(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The answer as an action. Raises `Invalid`."""
    text = unfenced(text)
    braced = text[text.find("{") : text.rfind("}") + 1]
    for candidate in (text, braced):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    alone = _only_field(schema)
    if alone is None:
        raise Invalid("it has no JSON object")
    if _properties(schema)[alone].get("type") != "string":
        try:
            return {alone: json.loads(text)}
        except (ValueError, RecursionError):
            pass
    return {alone: text}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = schema.get("properties", {})
    return properties


def _only_field(schema: dict[str, Any]) -> str | None:
    """The field that an action must have, where it is one."""
    required = schema.get("required", [])
    return str(required[0]) if len(required) == 1 and schema.get("title") not in _MCP else None


def _shown(observed: Observed) -> str:
    """The observation's fields without what is None and its metadata; a single text as it is."""
    fields = {name: each for name, each in observed.fields.items() if name != "metadata"}
    shown = _without_nothing(fields)
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(each) for key, each in value.items() if each is not None}
    return [_without_nothing(each) for each in value] if isinstance(value, list) else value

"""Environments of verifiers, unchanged, as an agent: its `Env.run_slot` plays each episode.

verifiers asks the gateway by OpenAI's chat completions, as any agent does, so that templates,
tokens and tools are EARL's own and the hosts' Python needs no tokenizer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from earl_core.environments.agent import MODEL, OPPONENT, episode_result
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options, at_least
from earl_core.environments.shared_world import SharedWorld
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.import_path import import_package

logger = logging.getLogger(__name__)

_MOST_TASKS = 1024


class VerifiersOptions(Options):
    """Options of the verifiers adapter.

    env: verifiers' own configuration of an environment, what --env.* sets there: {taskset: {id:
        ...}, ...} and, by their names, its seats.
    seats: names of the seats that are trained; needed where there are several. The others are
        played by the same policy, unless they have a model of their own, and are not trained.
    tasks: number of the taskset's tasks that are played, which the prompts take in turn; None: all,
        of an endless one 1,024.
    """

    env: dict[str, Any]
    seats: tuple[str, ...] = ()
    tasks: int | None = None

    def __post_init__(self) -> None:
        if self.tasks is not None:
            at_least("tasks", self.tasks, 1)


class Verifiers:
    """One episode. Its reward is the mean score of the traces of the trained seats."""

    options_model: ClassVar[type[VerifiersOptions]] = VerifiersOptions
    wants_policy: ClassVar[bool] = True
    policy: Mapping[str, str]

    def __init__(self, options: VerifiersOptions) -> None:
        self._world = _World.of(options)
        self._task: Any = None

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Take the task; the message says nothing."""
        self._task = self._world.task(prompt)
        return [{"role": "user", "content": "begin"}]

    async def step(self, text: str) -> StepResult:
        """Play it; the text says nothing."""
        return episode_result(await self._world.play(self._task, **self.policy))

    def close(self) -> None:
        """Close nothing, because it holds nothing."""


class _World(SharedWorld):
    """An environment of verifiers and its tasks, one for all episodes of a process."""

    def __init__(self, options: VerifiersOptions) -> None:
        verifiers = import_package("verifiers.v1", "verifiers")
        self._verifiers = verifiers
        self._keys = itertools.count()
        self._loading = threading.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._starting = asyncio.Lock()
        self._players = 0
        try:
            self.trained, config = self._seated(options)
            self._env = verifiers.load_environment(verifiers.resolve_env_config(config))
            endless = None if self._env.taskset.bounded else _MOST_TASKS
            self._source = itertools.islice(self._env.taskset, options.tasks or endless)
            self._tasks: list[Any] = []
            self.task(0)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"verifiers cannot make the environment of the option env: "
                f"{type(error).__name__}: {error}"
            ) from error

    def task(self, prompt: int) -> Any:
        """The prompt's task. The first prompt beyond all of them has the first again."""
        with self._loading:
            self._tasks += itertools.islice(self._source, max(0, prompt + 1 - len(self._tasks)))
            if not self._tasks:
                raise ConfigError("the taskset has no task: correct the option env")
            return self._tasks[prompt % len(self._tasks)]

    async def play(self, task: Any, base_url: str, api_key: str) -> dict[str, Any]:
        """Play an episode; its reward, and as metrics the means of rewards and metrics by name."""
        # verifiers takes keys from the environment; its programs get none of this name.
        variable = f"EARL_API_KEY_{next(self._keys)}"
        os.environ[variable] = api_key
        config = self._verifiers.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = self._verifiers.ModelContext(model=MODEL, client=config)
        try:
            async with self._served():
                (slot,) = self._env.slots(task)
                episode = await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]
        if not self._env.complete(episode):
            raise EarlError(f"verifiers' episode failed: {_errors(episode)}")
        traces = [each for each in episode.traces if each.agent.name in self.trained]
        if not traces:
            raise EarlError(f"verifiers' episode has no trace of {', '.join(self.trained)}")
        rewards = [{name: each.value for name, each in _there(trace.rewards)} for trace in traces]
        metrics = [dict(_there(trace.metrics)) for trace in traces]
        return {
            "reward": sum(trace.reward for trace in traces) / len(traces),
            "metrics": {**_means(metrics), **_means(rewards)},
        }

    def _seated(self, options: VerifiersOptions) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The trained seats, and the configuration with what each of the seats needs here."""
        verifiers = self._verifiers
        config: dict[str, Any] = json.loads(json.dumps(options.env))
        name = config.get("taskset", {}).get("id", "")
        fields = verifiers.env_config_type(name, config.get("id") or "").model_fields
        seats = {key: field.default for key, field in fields.items()}
        seats = {
            key: each for key, each in seats.items() if isinstance(each, verifiers.AgentConfig)
        }
        trained = options.seats or tuple(seats)
        if not set(trained) <= set(seats) or (not options.seats and len(seats) > 1):
            raise ConfigError(
                f"the environment {name!r} of verifiers has the seats {', '.join(seats)}",
                remedy="name by the option seats those that are trained",
            )
        unasked = []
        for key, default in seats.items():
            seat = config.setdefault(key, {})
            # verifiers' own default is a service that it rents.
            if isinstance(default.runtime, verifiers.PrimeConfig) and "runtime" not in seat:
                seat["runtime"] = {"type": "subprocess"}
                unasked.append(key)
            own = seat.get("client") or default.client or default.model
            if key not in trained and own is None:
                seat.setdefault("model", OPPONENT)
        harnesses = verifiers.resolve_env_config(config).agent_harnesses()
        for key in unasked:
            if verifiers.load_harness(harnesses[key]).EXECUTES_CODE:
                raise ConfigError(
                    f"the seat {key} has the harness {harnesses[key].id!r}, which runs commands of "
                    "the model",
                    remedy=f"say where by env.{key}.runtime, such as {{type: docker}}, or give it "
                    f'the chat loop, env.{key}.harness: {{id: "null"}}',
                )
        return trained, config

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """Serve what the episodes share, servers above all, while there is one of them."""
        async with self._starting:
            if not self._players:
                await self._serve()
            self._players += 1
        try:
            yield
        finally:
            self._players -= 1
            if not self._players:
                self._over.set()

    async def _serve(self) -> None:
        if self._serving is not None:
            await asyncio.wait({self._serving})
        self._over = over = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        # In a task of its own: what it begins has to be ended by the task that began it.
        async def serve() -> None:
            try:
                async with self._env.serving():
                    ready.set_result(None)
                    await over.wait()
            except Exception as error:
                if ready.done():
                    logger.warning("the servers of verifiers end with an error", exc_info=True)
                else:
                    ready.set_exception(error)

        self._serving = asyncio.create_task(serve())
        try:
            await ready
        except BaseException:
            over.set()
            raise


def _there(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((name, each) for name, each in values.items() if each is not None)


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    """Compute the mean of each name that has numbers."""
    found: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}


def _errors(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    told = (f"{error.type} {error.status_code or ''}: {error.message:.500}" for error in errors)
    return "; ".join(told) or "it says not why"

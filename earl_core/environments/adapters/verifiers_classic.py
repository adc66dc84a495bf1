"""Environments of verifiers' classic interface, unchanged, as an agent.

That is what most published ones are written in: `load_environment` of a package returns a
SingleTurnEnv, MultiTurnEnv, ToolEnv or StatefulToolEnv, and its `run_rollout` plays an episode by
OpenAI's chat completions and scores it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, ClassVar, Literal

from earl_core.environments.agent import MODEL, episode_result
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options
from earl_core.environments.shared_world import SharedWorld
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.import_path import import_package

_PATIENCE_SECONDS = 24 * 3600.0
"""Of the client: an engine may be away, and episodes have a deadline of their own."""

_FAULTS: ContextVar[list[str]] = ContextVar("faults")
"""What the reward functions of an episode have raised, which verifiers logs and scores with 0."""


class VerifiersClassicOptions(Options):
    """Options of the adapter for verifiers' classic interface.

    env: id of an environment: the module whose `load_environment` makes it.
    args: arguments of `load_environment`.
    split: the data set whose rows the prompts take in turn: train, or eval.
    """

    env: str
    args: dict[str, Any] = field(default_factory=dict)
    split: Literal["train", "eval"] = "train"


class VerifiersClassic:
    """One episode. Its reward is the rubric's."""

    options_model: ClassVar[type[VerifiersClassicOptions]] = VerifiersClassicOptions
    wants_policy: ClassVar[bool] = True
    policy: Mapping[str, str]

    def __init__(self, options: VerifiersClassicOptions) -> None:
        self._world = _World.of(options)
        self.prompt_count = self._world.count
        self._row: dict[str, Any] = {}

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Take the row; the message says nothing."""
        self._row = self._world.row(prompt)
        return [{"role": "user", "content": "begin"}]

    async def step(self, text: str) -> StepResult:
        """Play it; the text says nothing."""
        return episode_result(await self._world.play(self._row, **self.policy))

    def close(self) -> None:
        """Close nothing, because it holds nothing."""


class _World(SharedWorld):
    """An environment and its rows, one for all episodes of a process."""

    def __init__(self, options: VerifiersClassicOptions) -> None:
        verifiers = import_package("verifiers", "verifiers")
        if not hasattr(verifiers, "load_environment"):
            raise ConfigError(
                "this version of verifiers has no classic environments",
                remedy="install verifiers<0.4 in environment.python, or use the agent verifiers",
            )
        # Its environments set handlers, which only a main thread may, and a host has its own.
        import_package("verifiers.envs.environment", "verifiers").signal = _Signals()
        openai = import_package("openai", "openai")
        self._client_of = _client_class(verifiers.OpenAIChatCompletionsClient)
        self._shared: Any = None
        self._open = openai.AsyncOpenAI
        held_out = options.split == "eval"
        try:
            self._env = verifiers.load_environment(options.env, **options.args)
            every = list(_environments(verifiers, self._env))
            # Where it has none, `get_eval_dataset` returns the training rows.
            missing = held_out and any(each.build_eval_dataset() is None for each in every)
            self._rows = self._env.get_eval_dataset() if held_out else self._env.get_dataset()
            self.count = len(self._rows)
        except Exception as error:
            raise ConfigError(
                f"verifiers cannot make the environment {options.env!r} with the args "
                f"{options.args!r}: {type(error).__name__}: {error}"
            ) from error
        if missing:
            raise ConfigError(
                f"the environment {options.env!r} of verifiers, or one of its group, has no "
                "eval_dataset",
                remedy="give it one, or use split: train",
            )
        if not self.count:
            raise ConfigError(f"the environment {options.env!r} of verifiers has no rows")
        _watch(verifiers, options.env, every)

    def row(self, prompt: int) -> dict[str, Any]:
        """The prompt's row, by its number modulo theirs."""
        return dict(self._rows[prompt % self.count])

    async def play(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Play an episode; its reward, and the rubric's metrics."""
        if self._shared is None:
            # One for all episodes of the event loop: making one takes 50 ms.
            self._shared = self._open(
                base_url=base_url, api_key=api_key, timeout=_PATIENCE_SECONDS, max_retries=0
            )
        client = self._client_of(self._shared.with_options(base_url=base_url, api_key=api_key))
        sampling = copy.deepcopy(self._env.sampling_args)
        faults: list[str] = []
        _FAULTS.set(faults)
        played = await self._env.run_rollout(row, client, MODEL, sampling)
        if error := played.get("error"):
            told = error.get("error_chain_str", error) if isinstance(error, Mapping) else error
            raise EarlError(f"verifiers' episode failed: {told}")
        if faults:
            raise EarlError(f"a reward function of verifiers failed: {'; '.join(faults)}")
        metrics = (played.get("metrics") or {}).items()
        return {
            "reward": played["reward"],
            "outcome": str(played.get("stop_condition") or "completed"),
            "metrics": {
                name: float(value)
                for name, value in metrics
                if isinstance(value, int | float) and math.isfinite(value)
            },
        }


def _environments(verifiers: Any, environment: Any) -> Iterator[Any]:
    """An environment and, of a group, those in it."""
    yield environment
    if isinstance(environment, verifiers.EnvGroup):
        for each in environment.envs:
            yield from _environments(verifiers, each)


def _rubrics(verifiers: Any, rubric: Any) -> Iterator[Any]:
    """A rubric and, of a group, those in it."""
    yield rubric
    if isinstance(rubric, verifiers.RubricGroup):
        for each in rubric.rubrics:
            yield from _rubrics(verifiers, each)


def _watch(verifiers: Any, name: str, environments: list[Any]) -> None:
    """Have all reward functions note what they raise. Raises ConfigError for those of a group."""
    found = (each for one in environments for each in _rubrics(verifiers, one.rubric))
    for rubric in {id(each): each for each in found}.values():
        if any(rubric._is_group_func(function) for function in rubric.funcs):
            break
        rubric.funcs = [_noting(function) for function in rubric.funcs]
    else:
        if not any(getattr(each, "requires_group_rollouts", False) for each in environments):
            return
    raise ConfigError(
        f"the environment {name!r} of verifiers has reward functions of a whole group, and an "
        "episode is scored alone",
        remedy="give it a rubric of functions of one rollout",
    )


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function, plain or a coroutine function, which notes also what is no number."""

    @functools.wraps(function)
    def noted(*arguments: Any, **named: Any) -> Any:
        with _noted(function):
            value = function(*arguments, **named)
            return later(value) if inspect.isawaitable(value) else float(value)

    async def later(value: Awaitable[Any]) -> float:
        with _noted(function):
            return float(await value)

    return noted


@contextmanager
def _noted(function: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        _FAULTS.get([]).append(f"{name}: {type(error).__name__}: {error}")
        raise


def _client_class(base: Any) -> Any:
    """verifiers' client, but an answer without text and calls is one that its rubric scores."""

    async def checked(client: Any, response: Any) -> None:
        if response is None or len(response.choices or ()) != 1:
            await base.raise_from_native_response(client, response)

    return type("Client", (base,), {"raise_from_native_response": checked})


class _Signals:
    """The module `signal`, but for setting handlers."""

    def signal(self, number: int, handler: Any) -> None:
        """Set none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

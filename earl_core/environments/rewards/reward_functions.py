"""Reward functions of a run, as an environment host runs them.

A reward function is `score(episode, **options)`, a coroutine function or a plain one. It returns a
number, or a number and a dict whose numbers are averaged into metrics. `episode` is a dict, see
`experience.scoring`. An attribute `reward_range = (least, greatest)` of the function declares what
it can return.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from earl_core.environments.base import Message, StepResult
from earl_core.environments.real_numbers import real_number
from earl_core.secrets import redact, redact_error
from earl_core.system.errors import ConfigError
from earl_core.system.frames import WireError
from earl_core.system.import_path import import_object, refuse_library
from earl_core.system.similar import meant
from earl_core.system.wait import LATER

NAME = "reward functions"
"""Name by which `registry` knows reward functions; no import path has a space."""

BUILT_IN: dict[str, str] = {
    "judge": "earl_core.environments.judges:Judge",
    "reward_model": "earl_core.environments.judges:RewardModel",
    LATER: "earl_core.environments.later:Later",
}
"""Classes that are made of the options and called with episodes. Their requests end after
`timeout_seconds`, which they are given besides."""


class RewardFunctions:
    """One score, in the form of an environment of one step: the prompt says whose.

    functions: of each its `label`, the `function` and its `options`. timeout_seconds: of a score.
    Raises ConfigError for what is no such function, or does not take its options.
    """

    def __init__(self, functions: Sequence[Mapping[str, Any]], timeout_seconds: float) -> None:
        self._functions = [_bound(**each, timeout_seconds=timeout_seconds) for each in functions]
        self.reward_ranges = {
            each["label"]: getattr(getattr(made, "func", made), "reward_range", None)
            for each, made in zip(functions, self._functions, strict=True)
        }
        self._score: Callable[[Any], Any] | None = None

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Choose the function; the message says nothing."""
        self._score = self._functions[prompt]
        return [{"role": "user", "content": "score"}]

    def step(self, text: str) -> Any:
        """Score the episode that the text is the JSON of."""
        assert self._score is not None
        value = self._score(json.loads(text))
        return _awaited(value) if inspect.isawaitable(value) else _result(value)

    def close(self) -> None:
        """Close nothing, because it holds nothing."""


def _bound(
    label: str, function: str, options: Mapping[str, Any], timeout_seconds: float
) -> Callable[[Any], Any]:
    what = f"the reward function {label!r}"
    if ":" not in function and function not in BUILT_IN:
        raise ConfigError(
            f"{what}: there is no function {function!r}",
            remedy=f"{meant(function, BUILT_IN)}use one of {', '.join(BUILT_IN)}, or the import "
            "path of a function of your "
            "own, like 'package.module:function'",
        )
    made = import_object(BUILT_IN.get(function, function), what)
    try:
        if function in BUILT_IN:
            score: Callable[[Any], Any] = made(**{"timeout_seconds": timeout_seconds, **options})
        else:
            inspect.signature(made).bind({}, **options)
            refuse_library(made, function, what)
            score = partial(made, **options)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(
            redact(f"{what} cannot be called with an episode and its options: {error}"),
            remedy="correct reward.functions",
        ) from redact_error(error)
    return score


async def _awaited(value: Awaitable[Any]) -> StepResult:
    return _result(await value)


def _result(value: Any) -> StepResult:
    number, details = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(details, Mapping):
        raise WireError(f"It must return a number, or a number and a dict, not {value!r:.200}.")
    metrics = {
        str(name): told
        for name, each in details.items()
        if math.isfinite(told := real_number(each))
    }
    return StepResult([], number, True, {"metrics": metrics})

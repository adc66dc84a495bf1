"""Reward functions of one completion and its row, in our signature or TRL's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.base import Message
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object, refuse_library

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's that are about its trainer."""


class RowReward:
    """A reward function by its import path.

    `function(completion, row)`, with a third argument for the messages of tools; or TRL's, told by
    a parameter `completions`: `function(prompts, completions, **columns)`, which is given lists of
    one. Raises `ConfigError` for what is none.
    """

    def __init__(self, path: str) -> None:
        self._path, what = path, "the option reward_function"
        self.function = import_object(path, what)
        parameters = _parameters(self.function, f"{what} {path!r}")
        refuse_library(self.function, path, what)
        self._several = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._named = set(parameters)
        self._trl = "completions" in parameters
        self._told = sum(each.kind in _BY_PLACE for each in parameters.values()) > 2
        if not self._trl:
            return
        required = {name for name, each in parameters.items() if each.default is each.empty}
        if absent := [name for name in _NOT_GIVEN if name in required]:
            raise ConfigError(
                f"{what} {path!r} needs {', '.join(absent)}, which only TRL's trainer has",
                remedy="give the argument a default",
            )

    def __call__(
        self,
        completion: str,
        row: Mapping[str, Any],
        prompt: str | Sequence[Message],
        used: Sequence[Message],
    ) -> Any:
        """Return what the function returns for one completion. prompt: the row's text, or its
        messages. used: answers with calls before the completion, and the results."""
        if not self._trl:
            return self.function(completion, row, *([used] if self._told else []))
        said: Any = completion
        if not isinstance(prompt, str):
            said = [*used, {"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        given = {**columns, "prompts": [prompt], "completions": [said]}
        if not self._several:
            given = {name: value for name, value in given.items() if name in self._named}
        scores = list(self.function(**given))
        if len(scores) != 1:
            raise TypeError(
                f"the reward function {self._path!r} returned {len(scores)} rewards for one "
                "completion: it must return one for each"
            )
        return scores[0]


def _parameters(function: Any, what: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a plain function of either signature. Raises `ConfigError`."""
    if not callable(function):
        raise ConfigError(f"{what} is not a function", remedy="name one")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{what} is a coroutine function",
            remedy="make it a plain one, or name it in the section reward",
        )
    try:
        signature = inspect.signature(function)
        if "solution_str" in signature.parameters:
            raise ConfigError(
                f"{what} has verl's signature, (data_source, solution_str, ground_truth, ...)",
                remedy="write a function of (completion, row) that calls it",
            )
        if "completions" not in signature.parameters:
            places = sum(each.kind in _BY_PLACE for each in signature.parameters.values())
            signature.bind("completion", {}, *([[]] if places > 2 else []))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is no function of (completion, row), nor of (prompts, completions, "
            f"**columns): {error}",
            remedy="name one that is",
        ) from error
    return signature.parameters

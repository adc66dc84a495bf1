"""An agent of the user's own, as an environment host runs it.

The agent is a function `run(task, base_url, api_key)`, a coroutine function or a plain one. It asks
the policy by OpenAI's API at `base_url`, and returns the episode's reward: a number, or a dict with
`reward`, `rewards` (of single answers, by the `id` of their replies) or both, perhaps `roles` (of
their conversations), and, as in `StepResult.info`, `outcome`, `metrics` and `scoring`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from earl_core.environments.base import Message, StepResult
from earl_core.environments.real_numbers import checked_number
from earl_core.system.errors import ConfigError
from earl_core.system.frames import WireError
from earl_core.system.import_path import import_object, refuse_library

PREFIX = "agent:"
"""Mark before the import path of an agent, where environments have their names."""

MODEL, OPPONENT = "policy", "opponent"
"""The models that an agent may ask. The second is the same policy, whose answers are recorded
nowhere: an opponent, a simulated user. Any other name is the first's."""

UNNAMED = "unnamed"
"""In metrics: the role of conversations that have none, beside others that have one."""

POSTED = "reward_posted"
"""In the info of an episode whose reward is the one that was posted to the gateway."""


REWARDS = "rewards"
"""In what an agent returns, and in the info made of it: rewards of answers, by their ids."""

ROLES = "roles"
"""Likewise: roles of their conversations."""

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class AgentEnvironment:
    """One episode of an agent, in the form of an environment of one step.

    path: import path of the function. options: given to it in the task, a dict {"index": prompt,
    "seed": seed, **options}. Raises ConfigError when it is no such function.
    """

    wants_policy = True
    policy: Mapping[str, str]

    step: Any
    """Runs the agent to its end; the text says nothing."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self._run = import_object(path, "the agent")
        self._options = dict(options)
        self._task: dict[str, Any] = {}
        try:
            inspect.signature(self._run).bind("task", base_url="", api_key="")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the agent {path!r} is no function of (task, base_url, api_key): {error}"
            ) from error
        refuse_library(self._run, path, "the agent")
        self.step = self._step if inspect.iscoroutinefunction(self._run) else self._call

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Take the task; the message says nothing."""
        self._task = {**self._options, "index": prompt, "seed": seed}
        return [{"role": "user", "content": "begin"}]

    async def _step(self, text: str) -> StepResult:
        return episode_result(await self._run(self._task, **self.policy))

    def _call(self, text: str) -> Any:
        value = self._run(self._task, **self.policy)
        # A decorated coroutine function may be a plain one that returns the coroutine.
        return _awaited(value) if inspect.isawaitable(value) else episode_result(value)

    def close(self) -> None:
        """Close nothing, because it holds nothing."""


async def _awaited(value: Awaitable[Any]) -> StepResult:
    return episode_result(await value)


def episode_result(value: Any) -> StepResult:
    """Turn an agent's return value into the result of its one step. Raises WireError."""
    info: dict[str, Any] = {}
    if isinstance(value, Mapping):
        info = {str(key): each for key, each in value.items()}
        if REWARDS in info:
            info[REWARDS] = _rewards(info[REWARDS])
            info.setdefault("reward", 0.0)
        if ROLES in info:
            info[ROLES] = _roles(info[ROLES])
        if "reward" not in info:
            raise WireError(
                f"The agent returned a dict without a reward (`reward`, `rewards`): {sorted(info)}."
            )
        value = info.pop("reward")
    return StepResult([], value, True, info)


def checked_role(name: Any) -> str:
    """Name of a role. Raises WireError for what is none."""
    if not isinstance(name, str) or not _ROLE.fullmatch(name):
        raise WireError(
            f"A role has 1 to 32 letters, digits, dots, dashes and underscores, not {name!r:.50}."
        )
    if name == OPPONENT:
        raise WireError(
            f"The role {OPPONENT!r} is that of the environment's opponent: choose another."
        )
    if name == UNNAMED:
        raise WireError(
            f"The role {UNNAMED!r} is that of conversations without a role: choose another."
        )
    return name


def _roles(given: Any) -> dict[str, str]:
    return {id_: checked_role(name) for id_, name in _by_id(ROLES, given).items()}


def _by_id(what: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
        raise WireError(
            f"`{what}` must be a dict by the `id` of the answers' replies, not {given!r:.200}."
        )
    return given


def _rewards(given: Any) -> dict[str, float]:
    given = _by_id(REWARDS, given)
    for id_, value in given.items():
        # A truth value is a comparison that was put in the wrong place. numpy's has this name.
        if type(value).__name__ in ("bool", "bool_"):
            raise WireError(f"The reward of the answer {id_!r:.80} must be a number, not {value}.")
    return {
        id_: checked_number(f"The reward of the answer {id_!r:.80}", value)
        for id_, value in given.items()
    }


class KeyTwice(ValueError):
    """JSON has an object with a key that stands twice, so that one value would be lost."""


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, for `json.loads`. Raises `KeyTwice`."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise KeyTwice(f"{twice!r:.80} stands twice in one object: name it once")
    return made

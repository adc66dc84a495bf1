"""An agent of the user's own, as an environment host runs it.

The agent is a function `run(task, base_url, api_key)`, a coroutine function or a plain one. It asks
the policy by OpenAI's API at `base_url`, and returns the episode's reward: a number, or a dict with
`reward` and, as in `StepResult.info`, `outcome`, `metrics` and `scoring`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from earl_core.environments.base import Message, StepResult
from earl_core.system.errors import ConfigError
from earl_core.system.frames import WireError
from earl_core.system.import_path import import_object, refuse_library

PREFIX = "agent:"
"""Mark before the import path of an agent, where environments have their names."""

MODEL, OPPONENT = "policy", "opponent"
"""The models that an agent may ask. The second is the same policy, whose answers are recorded
nowhere: an opponent, a simulated user. Any other name is the first's."""

POSTED = "reward_posted"
"""In the info of an episode whose reward is the one that was posted to the gateway."""


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
        if "reward" not in info:
            raise WireError(f"The agent returned a dict without a reward: {sorted(info)}.")
        value = info.pop("reward")
    return StepResult([], value, True, info)

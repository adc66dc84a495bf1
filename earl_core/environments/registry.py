"""Environments by name: the built-in ones, and any class by its import path."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast, get_origin, get_type_hints

from earl_core.environments.agent import PREFIX, AgentEnvironment
from earl_core.environments.base import LARGEST_NUMBER, Environment
from earl_core.environments.options import parse_options
from earl_core.environments.real_numbers import real_number
from earl_core.environments.rewards.reward_functions import NAME, RewardFunctions
from earl_core.environments.tools.episode_tools import HostTools
from earl_core.environments.tools.functions import load_tool
from earl_core.environments.tools.mcp import open_servers
from earl_core.secrets import redact, redact_error, resolve
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import bare, import_object, refuse_library
from earl_core.system.similar import meant

BUILT_IN: dict[str, str] = {
    "tic_tac_toe": "earl_core.environments.games.tic_tac_toe:TicTacToe",
    "connect_four": "earl_core.environments.games.connect_four:ConnectFour",
    "prompt": "earl_core.environments.prompt:PromptEnvironment",
    "textarena": "earl_core.environments.adapters.textarena:TextArenaEnvironment",
    "gymnasium": "earl_core.environments.adapters.gymnasium:GymnasiumEnvironment",
    "pettingzoo": "earl_core.environments.adapters.pettingzoo:PettingZooEnvironment",
    "reasoning_gym": "earl_core.environments.adapters.reasoning_gym:ReasoningGymEnvironment",
    "openenv": "earl_core.environments.adapters.openenv:OpenEnv",
    f"{PREFIX}program": "earl_core.environments.adapters.program:Program",
    f"{PREFIX}task_directories": "earl_core.environments.task_directories.environment"
    ":TaskDirectories",
    f"{PREFIX}verifiers": "earl_core.environments.adapters.verifiers:Verifiers",
    f"{PREFIX}verifiers_classic": (
        "earl_core.environments.adapters.verifiers_classic:VerifiersClassic"
    ),
}
_AGENTS = [each.removeprefix(PREFIX) for each in BUILT_IN if each.startswith(PREFIX)]


def can_replay(made: object, configured: bool, mcp: Sequence[Any]) -> bool:
    """Tell whether an environment's episodes can be played again from their answers. configured:
    the run file's word. What other servers did is not undone, and what the policy answered not said
    again."""
    same = configured and bool(getattr(made, "deterministic", True))
    return same and not (mcp or getattr(made, "wants_policy", False))


MOST_PROMPTS = 10**8
"""A curriculum over prompts has some numbers for each."""


def prompt_count(made: object) -> int:
    """The number of prompts after which they come again; 0 where the environment does not say, or
    not by an integer up to `MOST_PROMPTS`."""
    count = getattr(made, "prompt_count", 0)
    known = not isinstance(count, bool) and hasattr(count, "__index__")
    return int(count) if known and 0 <= int(count) <= MOST_PROMPTS else 0


def declared_ranges(made: object, name: str) -> dict[str, list[float]]:
    """What is declared of rewards: [least, greatest] return of an environment's episode, under the
    empty name; of reward functions by their labels. Raises ConfigError."""
    given: dict[str, Any] = {"": getattr(made, "return_range", None)}
    if isinstance(made, RewardFunctions):
        given = made.reward_ranges
    return {
        label: _range_of(value, f"{name} {label}".rstrip())
        for label, value in given.items()
        if value is not None
    }


def _range_of(value: Any, what: str) -> list[float]:
    try:
        low, high = map(real_number, value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise ConfigError(
            f"{what} declares its rewards to be in {value!r:.200}",
            remedy="write the least and the greatest, such as (0.0, 1.0)",
        )
    # The wire takes no infinity.
    return [max(low, -LARGEST_NUMBER), min(high, LARGEST_NUMBER)]


_FORWARDING = ("__getattr__", "__getattribute__")


def create(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Makes one environment.

    name: a key of `BUILT_IN`, or `package.module:Class`; a class of your own is called as
        `Class(**options)`. `agent:package.module:function` is an agent.
    options: references in them (`env:NAME`, `file:PATH`) are resolved here.
    Raises ConfigError when the name or an option is wrong.
    """
    options = _resolved(name, options or {})
    if name == NAME:
        return RewardFunctions(**options)
    if name in BUILT_IN:
        factory = import_object(BUILT_IN[name], "the environment")
        environment: Environment = factory(parse_options(factory.options_model, options, name))
        return environment
    if name.startswith(PREFIX):
        path = name.removeprefix(PREFIX)
        if ":" not in path:
            raise ConfigError(
                f"there is no agent {path!r}",
                remedy=f"{meant(path, _AGENTS)}use one of {', '.join(_AGENTS)}, or the import "
                "path of a function of your own, like 'package.module:function'",
            )
        return AgentEnvironment(path, options)
    factory = _own_class(name)
    _refuse_other(factory, name)
    try:
        created = factory(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            redact(
                f"the environment {name!r} cannot be made with the options {options!r}: "
                f"{type(error).__name__}: {error}"
            )
        ) from redact_error(error)
    if not isinstance(created, Environment):
        raise _no_environment(name)
    return created


def _refuse_other(factory: Any, name: str) -> None:
    """Raise `ConfigError` before something is called that makes no environment by what it says."""
    refuse_library(factory, name, "the environment")
    made = _made_by(factory)
    kinds = inspect.getmro(made) if made else ()
    named = {each for kind in kinds for each in (*vars(kind), *inspect.get_annotations(kind))}
    # Methods may be set by the constructor where the class announces them, or be another object's.
    other = any(inspect.isfunction(getattr(made, name, None)) for name in _FORWARDING)
    if not ({"reset", "step", "close"} <= named or other):
        raise _no_environment(name)
    refuse_library(made, name, "the environment")


def _made_by(factory: Any) -> type | None:
    """The class of what it makes: a class, also with options or wrapped, a method of one, or a
    function that is annotated with one."""
    try:
        made = bare(inspect.unwrap(bare(factory)))
        made = get_origin(made) or made
        if not isinstance(made, type):
            said = get_type_hints(made).get("return")
            made = getattr(made, "__self__", None) if said in (None, Self) else said
    except (TypeError, NameError, AttributeError, SyntaxError, ValueError):
        return None
    made = get_origin(made) or made
    return made if isinstance(made, type) else None


def _no_environment(name: str) -> ConfigError:
    return ConfigError(
        f"the environment {name!r} is none",
        remedy="it must have the methods reset(prompt, seed), step(text) and close(), as "
        "earl_core.environments.base.Environment says; a class whose constructor sets them must "
        "name them (`reset: Any`), a function that makes one its class (`-> Game`)",
    )


def _resolved(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {key: resolve(value) for key, value in options.items()}
    except ConfigError as error:
        raise ConfigError(f"an option of the environment {name!r}: {error}") from None


def _own_class(name: str) -> Any:
    if ":" not in name:
        known = [each for each in BUILT_IN if not each.startswith(PREFIX)]
        if f"{PREFIX}{name}" in BUILT_IN:
            raise ConfigError(
                f"{name!r} is an agent", remedy="name it by environment.agent, without a name"
            )
        raise ConfigError(
            f"there is no environment {name!r}",
            remedy=f"{meant(name, known)}use one of {', '.join(known)}, or the import path of a "
            "class of your own, "
            "like 'package.module:Class'",
        )
    return import_object(name, "the environment")


def check(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Makes and closes one environment, so that a mistake shows before work starts.

    Imports the user's code and opens its data. Returns the environment, for what it says of itself.
    Raises ConfigError.
    """
    environment: Any = create(name, options)
    closing = environment.close()
    if inspect.iscoroutine(closing):
        asyncio.run(closing)
    return cast("Environment", environment)


def characters_of(environment: Environment, name: str) -> str:
    """The characters that the environment names, each once. Raises ConfigError."""
    named = getattr(environment, "characters", "")
    if not isinstance(named, str):
        raise ConfigError(
            f"the attribute `characters` of the environment {name!r} is no text: {named!r:.200}",
            remedy="make it a text that has every character of its messages and of the answers",
        )
    return "".join(sorted(set(named)))


async def host_tools(
    tools: Sequence[str], mcp: Sequence[Mapping[str, Any]], timeout_seconds: float
) -> HostTools:
    """Load the functions that the model may call, and ask the servers for theirs. Raises
    ConfigError."""
    return HostTools([*map(load_tool, tools)], await open_servers(mcp), timeout_seconds)

"""Spaces of gymnasium as texts: what an action may be, how it is read, how observations look."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.adapters.fenced import unfenced
from earl_core.environments.base import LARGEST_NUMBER
from earl_core.system.errors import ConfigError

_MOST_NUMBERS = 256
_MOST_METRICS = 32
_KINDS = ("Dict", "Tuple", "Box", "MultiDiscrete", "MultiBinary", "Discrete", "Text")


def metrics_of(info: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers and truth values of an `info`, by name, some of them at most."""
    plain = {
        str(key): value.tolist() if hasattr(value, "tolist") else value
        for key, value in info.items()
    }
    numbers = {
        key: float(value)
        for key, value in plain.items()
        if isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER
    }
    return dict(list(numbers.items())[:_MOST_METRICS])


def expected(space: Any, names: Sequence[str], what: str) -> str:
    """The sentence that says what an action is. names: of a Discrete space's actions, or none.
    what: the environment. Raises ConfigError for names of another space."""
    kind = kind_of(space)
    if not names:
        form = "" if kind in ("Discrete", "Text") else "JSON: "
        return f"Answer with {form}{described(space)}."
    if kind != "Discrete" or len(names) != space.n or len(set(map(str.casefold, names))) != space.n:
        actions = f"{space.n} actions" if kind == "Discrete" else f"a space of kind {kind}"
        raise ConfigError(
            f"the option actions names {', '.join(names)}, and {what} has {actions}",
            remedy="name each action once, in their order, or drop the option",
        )
    return f"Answer with one of: {', '.join(names)}."


def mask_of(space: Any, given: Any) -> Sequence[Any] | None:
    """Whether each action of a Discrete space is possible, where what is given says so."""
    mask = as_plain(given)
    if kind_of(space) != "Discrete" or not isinstance(mask, list) or len(mask) != space.n:
        return None
    return mask if all(isinstance(each, int | float) for each in mask) else None


def possible_names(space: Any, mask: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The actions that are possible, as an answer names them."""
    every = names or range(space.start, space.start + len(mask))
    return [str(name) for name, one in zip(every, mask, strict=True) if one]


def told_possible(names: Sequence[str]) -> str:
    """The sentence that tells which actions are possible."""
    return f"Possible now: {', '.join(names)}." if names else ""


def read_action(
    space: Any,
    answer: str,
    names: Sequence[str],
    pattern: str | None,
    mask: Sequence[Any] | None,
) -> Any:
    """The action that an answer names, or what the pattern finds in it. Raises ValueError, which
    says what is wrong."""
    if pattern is not None:
        found = re.findall(pattern, answer)
        if not found:
            raise ValueError(f"it does not match {pattern}")
        answer = found[-1]
    action = _parse_action(space, answer, names)
    if mask is not None and not mask[int(action) - int(space.start)]:
        raise ValueError("this action is not possible now")
    return action


def kind_of(space: Any) -> str:
    """The kind of a space, also of one of a class derived from gymnasium's."""
    names = [each.__name__ for each in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


def check_space(space: Any, what: str) -> None:
    """Raises ConfigError unless the space's values can be read and written as text."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        for each in _parts(space):
            check_space(each, what)
    elif kind in ("Box", "MultiDiscrete", "MultiBinary"):
        count = 1
        for size in space.shape:
            count *= size
        if count > _MOST_NUMBERS:
            raise ConfigError(
                f"{what} has {count} numbers, more than the {_MOST_NUMBERS} that make a text",
                remedy="wrap the environment so that it has less, or has a text",
            )
    elif kind not in ("Discrete", "Text"):
        raise ConfigError(
            f"{what} is a {kind}, which has no form as text",
            remedy="wrap the environment so that it is Discrete, Text, Box, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of these",
        )


def described(space: Any) -> str:
    """Describe a value of the space, in JSON where it is not one number or text."""
    match kind_of(space):
        case "Discrete":
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case "Text":
            characters = "".join(sorted(space.character_set))
            return f"{space.min_length} to {space.max_length} of the characters {characters}"
        case "MultiDiscrete":
            first, last = space.start, space.start + space.nvec - 1
            return f"a list of whole numbers from {as_text(first)} to {as_text(last)}"
        case "MultiBinary":
            return f"a list of zeros and ones of shape {list(space.shape)}"
        case "Box":
            low, high = as_text(space.low), as_text(space.high)
            return f"a list of numbers of shape {list(space.shape)} from {low} to {high}"
        case "Dict":
            inner = (f"{json.dumps(key)}: {described(each)}" for key, each in space.spaces.items())
            return "{" + ", ".join(inner) + "}"
        case _:
            return "[" + ", ".join(map(described, space.spaces)) + "]"


def as_text(value: Any) -> str:
    """An observation: a text as it is, a mapping in lines, else JSON with four digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {as_text(each)}" for key, each in value.items())
    return json.dumps(as_plain(value))


def _parse_action(space: Any, answer: str, names: Sequence[str]) -> Any:
    """The action that an answer names: the last number or name in it, a text, or JSON. names: of a
    Discrete space's actions, or none. Raises ValueError, which says what is wrong."""
    kind = kind_of(space)
    if names:
        every = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{every})(?!\w)", answer, re.IGNORECASE)
        if not found:
            raise ValueError("it names no action")
        lower = [name.casefold() for name in names]
        return int(space.start) + lower.index(found[-1].casefold())
    if kind == "Discrete":
        numbers = re.findall(r"-?\d+" if space.start < 0 else r"\d+", answer)
        if not numbers:
            raise ValueError("it has no number")
        value: Any = int(numbers[-1][:20])
    elif kind == "Text":
        value = unfenced(answer)
    else:
        value = _parsed(answer)
    action = _shaped(space, value)
    if not space.contains(action):
        raise ValueError(f"{value!r:.200} is not {described(space)}")
    return action


def _parts(space: Any) -> Any:
    return space.spaces.values() if isinstance(space.spaces, Mapping) else space.spaces


def as_plain(value: Any) -> Any:
    """A value as JSON has it, with four digits of each number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _parsed(answer: str) -> Any:
    try:
        return json.loads(unfenced(answer))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None


def _shaped(space: Any, value: Any) -> Any:
    """JSON as the space has it. Raises ValueError."""
    import numpy as np

    kind = kind_of(space)
    if kind == "Dict":
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            raise ValueError(f"it must be an object with the keys {', '.join(space.spaces)}")
        return {key: _shaped(each, value[key]) for key, each in space.spaces.items()}
    if kind == "Tuple":
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ValueError(f"it must be a list of {len(space.spaces)} values")
        return tuple(_shaped(each, part) for each, part in zip(space.spaces, value, strict=True))
    if kind in ("Discrete", "Text"):
        return value
    given = np.asarray(value)
    if given.dtype.kind not in "iuf":
        raise ValueError(f"{value!r:.200} is not {described(space)}")
    action = given.astype(space.dtype)
    if given.shape != space.shape or (kind != "Box" and not np.array_equal(action, given)):
        raise ValueError(f"{value!r:.200} is not {described(space)}")
    return action

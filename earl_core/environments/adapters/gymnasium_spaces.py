"""Gymnasium's spaces as texts: what an answer may be, observations, actions out of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.system.errors import ConfigError

_MOST_NUMBERS = 256
_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")


def check_space(space: Any, what: str) -> None:
    """Raises ConfigError unless the space's values can be read and written as text."""
    kind = type(space).__name__
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
    match type(space).__name__:
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
    return json.dumps(_plain(value))


def parse_action(space: Any, answer: str, names: Sequence[str]) -> Any:
    """The action that an answer names: the last number or name in it, a text, or JSON.

    names: of a Discrete space's actions, or none. Raises ValueError, which says what is wrong.
    """
    kind = type(space).__name__
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
        value = answer.strip()
    else:
        value = _parsed(answer)
    action = _shaped(space, value)
    if not space.contains(action):
        raise ValueError(f"{value!r:.200} is not {described(space)}")
    return action


def uncoloured(rendered: str) -> str:
    """A terminal's picture without its colours, which are told below it."""
    text, marks, end = "", [], 0
    rendered = rendered.strip("\n")
    for match in _COLOURED.finditer(rendered):
        text += rendered[end : match.start()]
        place = f"line {text.count(chr(10)) + 1}, column {len(text) - text.rfind(chr(10))}"
        marks.append(f'"{match[2]}" {_style(match[1])} ({place})')
        text, end = text + match[2], match.end()
    text += rendered[end:]
    return f"{text}\nMarked: {'; '.join(marks)}" if marks else text


def _style(codes: str) -> str:
    words = []
    for code in (int(each or 0) for each in codes.split(";")):
        for first, before in ((30, ""), (40, "on ")):
            if 0 <= code - first < len(_COLOURS):
                words.append(before + _COLOURS[code - first])
    return " ".join(words)


def _parts(space: Any) -> Any:
    return space.spaces.values() if isinstance(space.spaces, Mapping) else space.spaces


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _parsed(answer: str) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None


def _shaped(space: Any, value: Any) -> Any:
    """JSON as the space has it. Raises ValueError."""
    import numpy as np

    kind = type(space).__name__
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

"""Adapter for gymnasium environments whose observations and actions can be texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from earl_core.environments.adapters.fenced import unfenced
from earl_core.environments.base import LARGEST_NUMBER, Message, StepResult
from earl_core.environments.options import Options, at_least, check_pattern
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package


class GymnasiumOptions(Options):
    """Options of the gymnasium adapter.

    id: id of an environment, such as "FrozenLake-v1", or "package.module:Id-v0" for one that this
        module registers.
    make_options: options of gymnasium.make. render_mode is "ansi" where the environment has that.
    rules: text before the first observation.
    actions: names of a Discrete space's actions, in their order; () for their numbers.
    answer_pattern: regular expression whose last match, or its group 1, is the action; None: the
        whole answer.
    possible: key of `info` that says which actions are possible now, told with each observation: a
        mask of a Discrete space's actions, which refuses the others (action_mask), or a list of
        texts (admissible_commands).
    allowed_errors: illegal answers forgiven per turn before the episode ends.
    illegal_reward: reward of an illegal answer that ends the episode.
    """

    id: str
    make_options: dict[str, Any] = field(default_factory=dict)
    rules: str = ""
    actions: tuple[str, ...] = ()
    answer_pattern: str | None = None
    possible: str | None = None
    allowed_errors: int = 0
    illegal_reward: float = -1.0

    def __post_init__(self) -> None:
        at_least("allowed_errors", self.allowed_errors, 0)
        if self.answer_pattern is not None:
            check_pattern("answer_pattern", self.answer_pattern)


class GymnasiumEnvironment:
    """One episode of a gymnasium environment.

    The prompt index seeds the reset; (prompt, seed) seeds the generator that the environment has
    from then on, `np_random`. `info` at the end: `outcome` (terminated, truncated, illegal),
    `metrics` (env_steps, illegal_answers, and the numbers of the environment's last `info`).
    """

    options_model: ClassVar[type[GymnasiumOptions]] = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions) -> None:
        self.options = options
        self._environment = _make(options)
        self._rendered = self._environment.render_mode == "ansi"
        title = f"of the environment {options.id!r} of gymnasium"
        self._space = self._environment.action_space
        _check_space(self._space, f"the action space {title}")
        if not self._rendered:
            _check_space(self._environment.observation_space, f"the observation space {title}")
        self._expected = _expected(self._space, options)
        self._steps = self._illegal = self._errors = 0
        self._info: Mapping[str, Any] = {}
        self._done = True

    def reset(self, prompt: int, seed: int) -> list[Message]:
        import numpy as np

        observation, self._info = self._environment.reset(seed=_seed(f"{self.options.id}/{prompt}"))
        again = np.random.default_rng(_seed(f"{self.options.id}/{prompt}/{seed}"))
        self._environment.unwrapped.np_random = again
        self._steps = self._illegal = self._errors = 0
        self._done = False
        parts = (self.options.rules, self._expected, self._shown(observation))
        return _user("\n\n".join(part for part in parts if part))

    def step(self, text: str) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over or was not begun: call reset first")
        try:
            action = self._parsed(text)
        except ValueError as error:
            return self._refused(str(error))
        self._errors = 0
        self._steps += 1
        observation, reward, terminated, truncated, self._info = self._environment.step(action)
        outcome = "terminated" if terminated else "truncated" if truncated else None
        return self._result(self._shown(observation), float(reward), outcome)

    def close(self) -> None:
        self._done = True
        self._environment.close()

    def _parsed(self, text: str) -> Any:
        if self.options.answer_pattern is not None:
            found = re.findall(self.options.answer_pattern, text)
            if not found:
                raise ValueError(f"it does not match {self.options.answer_pattern}")
            text = found[-1]
        action = _parse_action(self._space, text, self.options.actions)
        mask = self._mask()
        if mask is not None and not mask[int(action) - int(self._space.start)]:
            raise ValueError("this action is not possible now")
        return action

    def _mask(self) -> Sequence[Any] | None:
        """Whether each action of a Discrete space is possible, where the environment says so."""
        if self.options.possible is None or _kind(self._space) != "Discrete":
            return None
        mask = _plain(self._info.get(self.options.possible))
        if not isinstance(mask, list) or len(mask) != self._space.n:
            return None
        return mask if all(isinstance(each, int | float) for each in mask) else None

    def _possible(self) -> str:
        """The sentence that tells which actions are possible."""
        if self.options.possible is None:
            return ""
        if (mask := self._mask()) is not None:
            names = self.options.actions or range(self._space.start, self._space.start + len(mask))
            told = [str(name) for name, one in zip(names, mask, strict=True) if one]
        else:
            told = [str(each) for each in self._info.get(self.options.possible) or ()]
        return f"Possible now: {', '.join(told)}." if told else ""

    def _refused(self, why: str) -> StepResult:
        self._illegal += 1
        self._errors += 1
        left = self.options.allowed_errors + 1 - self._errors
        told = f"Illegal answer: {why}."
        if left <= 0:
            return self._result(told, self.options.illegal_reward, "illegal")
        tries = "1 try is" if left == 1 else f"{left} tries are"
        return self._result(f"{told} {self._expected} {tries} left.", 0.0, None)

    def _result(self, text: str, reward: float, outcome: str | None) -> StepResult:
        if outcome is None:
            return StepResult(_user(text), reward, False)
        self._done = True
        own = {"env_steps": self._steps, "illegal_answers": self._illegal}
        metrics = {**_numbers(self._info), **own}
        outcomes = ["terminated", "truncated", "illegal"]
        info = {"outcome": outcome, "outcomes": outcomes, "metrics": metrics}
        return StepResult(_user(text), reward, True, info)

    def _shown(self, observation: Any) -> str:
        rendered = self._rendered
        shown = _uncoloured(str(self._environment.render())) if rendered else _as_text(observation)
        return "\n\n".join(filter(None, (shown, self._possible())))


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
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


def _make(options: GymnasiumOptions) -> Any:
    gymnasium = import_package("gymnasium", "gymnasium")
    try:
        made = gymnasium.make(options.id, **options.make_options)
        modes = made.metadata.get("render_modes") or ()
        if "ansi" in modes and "render_mode" not in options.make_options:
            made.close()
            made = gymnasium.make(options.id, render_mode="ansi", **options.make_options)
    except Exception as error:
        raise ConfigError(
            f"the environment {options.id!r} of gymnasium cannot be made with the make_options "
            f"{options.make_options!r}: {type(error).__name__}: {error}",
            remedy="correct the option id or make_options, or install what it needs",
        ) from error
    return made


def _expected(space: Any, options: GymnasiumOptions) -> str:
    kind, names = _kind(space), options.actions
    if not names:
        form = "" if kind in ("Discrete", "Text") else "JSON: "
        return f"Answer with {form}{_described(space)}."
    if kind != "Discrete" or len(names) != space.n or len(set(map(str.casefold, names))) != space.n:
        actions = f"{space.n} actions" if kind == "Discrete" else f"a space of kind {kind}"
        raise ConfigError(
            f"the option actions names {', '.join(names)}, and {options.id} has {actions}",
            remedy="name each action once, in their order, or drop the option",
        )
    return f"Answer with one of: {', '.join(names)}."


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _seed(text: str) -> int:
    return random.Random(f"gymnasium/{text}").getrandbits(32)


_MOST_NUMBERS = 256
_MOST_METRICS = 32
_KINDS = ("Dict", "Tuple", "Box", "MultiDiscrete", "MultiBinary", "Discrete", "Text")
_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")


def _kind(space: Any) -> str:
    """The kind of a space, also of one of a class derived from gymnasium's."""
    names = [each.__name__ for each in type(space).__mro__]
    return next((name for name in names if name in _KINDS), names[0])


def _check_space(space: Any, what: str) -> None:
    """Raises ConfigError unless the space's values can be read and written as text."""
    kind = _kind(space)
    if kind in ("Dict", "Tuple"):
        for each in _parts(space):
            _check_space(each, what)
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


def _described(space: Any) -> str:
    """Describe a value of the space, in JSON where it is not one number or text."""
    match _kind(space):
        case "Discrete":
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case "Text":
            characters = "".join(sorted(space.character_set))
            return f"{space.min_length} to {space.max_length} of the characters {characters}"
        case "MultiDiscrete":
            first, last = space.start, space.start + space.nvec - 1
            return f"a list of whole numbers from {_as_text(first)} to {_as_text(last)}"
        case "MultiBinary":
            return f"a list of zeros and ones of shape {list(space.shape)}"
        case "Box":
            low, high = _as_text(space.low), _as_text(space.high)
            return f"a list of numbers of shape {list(space.shape)} from {low} to {high}"
        case "Dict":
            inner = (f"{json.dumps(key)}: {_described(each)}" for key, each in space.spaces.items())
            return "{" + ", ".join(inner) + "}"
        case _:
            return "[" + ", ".join(map(_described, space.spaces)) + "]"


def _as_text(value: Any) -> str:
    """An observation: a text as it is, a mapping in lines, else JSON with four digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_as_text(each)}" for key, each in value.items())
    return json.dumps(_plain(value))


def _parse_action(space: Any, answer: str, names: Sequence[str]) -> Any:
    """The action that an answer names: the last number or name in it, a text, or JSON. names: of a
    Discrete space's actions, or none. Raises ValueError, which says what is wrong."""
    kind = _kind(space)
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
        raise ValueError(f"{value!r:.200} is not {_described(space)}")
    return action


def _uncoloured(rendered: str) -> str:
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
        return json.loads(unfenced(answer))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None


def _shaped(space: Any, value: Any) -> Any:
    """JSON as the space has it. Raises ValueError."""
    import numpy as np

    kind = _kind(space)
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
        raise ValueError(f"{value!r:.200} is not {_described(space)}")
    action = given.astype(space.dtype)
    if given.shape != space.shape or (kind != "Box" and not np.array_equal(action, given)):
        raise ValueError(f"{value!r:.200} is not {_described(space)}")
    return action

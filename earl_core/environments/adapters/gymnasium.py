"""Adapter for gymnasium environments whose observations and actions can be texts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from earl_core.environments.adapters.spaces import (
    as_text,
    check_space,
    expected,
    mask_of,
    metrics_of,
    possible_names,
    read_action,
    told_possible,
)
from earl_core.environments.base import Message, StepResult
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
        check_space(self._space, f"the action space {title}")
        if not self._rendered:
            check_space(self._environment.observation_space, f"the observation space {title}")
        self._expected = expected(self._space, options.actions, options.id)
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
        options = self.options
        pattern, mask = options.answer_pattern, self._mask()
        return read_action(self._space, text, options.actions, pattern, mask)

    def _mask(self) -> Sequence[Any] | None:
        possible = self.options.possible
        return None if possible is None else mask_of(self._space, self._info.get(possible))

    def _possible(self) -> str:
        """The sentence that tells which actions are possible."""
        if self.options.possible is None:
            return ""
        if (mask := self._mask()) is not None:
            return told_possible(possible_names(self._space, mask, self.options.actions))
        return told_possible([str(each) for each in self._info.get(self.options.possible) or ()])

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
        metrics = {**metrics_of(self._info), **own}
        outcomes = ["terminated", "truncated", "illegal"]
        info = {"outcome": outcome, "outcomes": outcomes, "metrics": metrics}
        return StepResult(_user(text), reward, True, info)

    def _shown(self, observation: Any) -> str:
        rendered = self._rendered
        shown = _uncoloured(str(self._environment.render())) if rendered else as_text(observation)
        return "\n\n".join(filter(None, (shown, self._possible())))


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


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _seed(text: str) -> int:
    return random.Random(f"gymnasium/{text}").getrandbits(32)


_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")


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

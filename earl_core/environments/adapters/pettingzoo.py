"""Adapter for games of pettingzoo with turns (AEC): the policy plays one agent of them."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from earl_core.environments.adapters.spaces import (
    as_text,
    check_space,
    expected,
    kind_of,
    mask_of,
    metrics_of,
    possible_names,
    read_action,
    told_possible,
)
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options, at_least, check_pattern
from earl_core.environments.policy_conversation import PolicyConversation
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object, import_package, refuse_library

_MASK = "action_mask"
_MOST_MOVES = 10_000
"""Moves of others without one of the agent's."""

_MOST_OPENINGS = 20
"""Openings of others that end the game before the agent has a turn."""


class PettingZooOptions(Options):
    """Options of the pettingzoo adapter.

    game: id of pettingzoo, such as "classic/tictactoe-v3", or the import path of a function that
        makes an AEC environment, such as "pettingzoo.classic.tictactoe_v3:env".
    make_options: arguments of pettingzoo.make, or of this function.
    agent: the agent that the policy plays, by its name; None: prompt n plays agent n modulo their
        number.
    opponent: who plays the others. random: random legal moves; policy: the policy itself.
    show: import path of function(environment, agent) -> str, the text of an observation; None: the
        numbers of the environment's own.
    rules: text before the first observation.
    actions: names of a Discrete space's actions, in their order; () for their numbers.
    answer_pattern: regular expression whose last match, or its group 1, is the action; None: the
        whole answer.
    allowed_errors: illegal answers forgiven per turn before the episode ends.
    illegal_reward: reward of an illegal answer that ends the episode.
    """

    game: str
    make_options: dict[str, Any] = field(default_factory=dict)
    agent: str | None = None
    opponent: Literal["random", "policy"] = "random"
    show: str | None = None
    rules: str = ""
    actions: tuple[str, ...] = ()
    answer_pattern: str | None = None
    allowed_errors: int = 0
    illegal_reward: float = -1.0

    def __post_init__(self) -> None:
        at_least("allowed_errors", self.allowed_errors, 0)
        if self.answer_pattern is not None:
            check_pattern("answer_pattern", self.answer_pattern)


class PettingZooEnvironment:
    """One episode of one agent.

    The prompt index fixes the agent and seeds the reset; (prompt, seed) seeds the others' random
    moves and the generator that the environment has from then on, `np_random`. A reward is what
    the environment has given the agent since its last turn. `info` at the end: `outcome`, `side`
    (the agent's name), `metrics` (env_steps, illegal_answers, opponent_illegal_answers where the
    policy plays the others, and the numbers of the agent's last `info`).
    """

    options_model: ClassVar[type[PettingZooOptions]] = PettingZooOptions
    policy: dict[str, str] | None = None

    def __init__(self, options: PettingZooOptions) -> None:
        self.options = options
        self._world = _make(options)
        self._names: list[str] = list(self._world.possible_agents)
        if options.agent is not None and options.agent not in self._names:
            raise ConfigError(
                f"the game {options.game!r} has no agent {options.agent!r}",
                remedy=f"use one of {', '.join(map(str, self._names))}",
            )
        self.wants_policy = options.opponent == "policy" and len(self._names) > 1
        show = _show_of(options.show)
        self._seats = {name: _Seat(self._world, name, options, show) for name in self._names}
        played = self._names if options.agent is None or self.wants_policy else [options.agent]
        for name in played:
            self._seats[name].check()
        self._me = self._seats[played[0]]
        self._moves = random.Random()
        self._totals: dict[str, float] = {}
        self._steps = self._illegal = self._errors = 0
        self._reward = self._owed = 0.0
        self._ended: str | None = None
        self._done = True

    def reset(self, prompt: int, seed: int) -> list[Message]:
        name = self.options.agent or self._names[prompt % len(self._names)]
        self._me = self._seats[name]
        for attempt in range(_MOST_OPENINGS):
            self._world.reset(seed=_seed(f"{self.options.game}/{prompt}"))
            self._reseed(f"{prompt}/{seed}/{attempt}")
            for seat in self._seats.values():
                seat.begin(self.policy if self.wants_policy and seat is not self._me else None)
            self._totals = dict.fromkeys(self._names, 0.0)
            self._steps = self._illegal = self._errors = 0
            self._ended, self._done = None, False
            self._let_others_move()
            if self._ended is None:
                break
        else:
            raise RuntimeError(
                f"{self.options.game} was over before the first move of {name}, "
                f"{_MOST_OPENINGS} times"
            )
        # What others' first moves have brought belongs to the first turn.
        self._owed = self._reward
        return _user(self._me.told(self._world.last()))

    def step(self, text: str) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over or was not begun: call reset first")
        try:
            action = self._me.read(text, self._world.last())
        except ValueError as error:
            return self._refused(str(error))
        self._errors = 0
        self._steps += 1
        self._world.step(action)
        self._let_others_move()
        reward, self._owed = self._owed + self._reward, 0.0
        if self._ended is not None:
            return self._end(self._ended, reward)
        self._totals[self._me.name] += reward
        return StepResult(_user(self._me.told(self._world.last())), reward, False)

    def legal_answers(self) -> list[str]:
        """The legal moves of a Discrete space."""
        if self._done or self.options.answer_pattern is not None:
            return []
        return self._me.legal(self._world.last())

    def close(self) -> None:
        self._done = True
        self._world.close()

    def _reseed(self, key: str) -> None:
        import numpy as np

        self._moves = random.Random(f"pettingzoo/moves/{self.options.game}/{key}")
        inner = self._world.unwrapped
        if isinstance(getattr(inner, "np_random", None), np.random.Generator):
            inner.np_random = np.random.default_rng(_seed(f"{self.options.game}/{key}"))

    def _let_others_move(self) -> None:
        """Play until the agent has a turn, or is out: then `_ended` is its outcome."""
        world, mine = self._world, self._me.name
        self._reward = float(world._cumulative_rewards.get(mine, 0.0))
        for _ in range(_MOST_MOVES):
            if mine not in world.agents:
                self._ended = self._outcome(truncated=False)
                return
            now = world.last()
            _, reward, terminated, truncated, _ = now
            name = world.agent_selection
            if name == mine:
                self._reward = float(reward)
                if terminated or truncated:
                    self._ended = self._outcome(truncated=not terminated)
                return
            if name not in self._seats:
                raise RuntimeError(
                    f"{self.options.game} has an agent {name}, whom its possible_agents lack"
                )
            self._totals[name] += float(reward)
            over = terminated or truncated
            world.step(None if over else self._seats[name].move(now, self._moves))
            self._reward = float(world._cumulative_rewards.get(mine, self._reward))
        raise RuntimeError(f"{mine} has no turn among {_MOST_MOVES} moves of {self.options.game}")

    def _outcome(self, truncated: bool) -> str:
        """How the episode has ended for the agent, by the rewards of all where they compete."""
        world, mine = self._world, self._me.name
        if truncated:
            return "truncated"
        others = [name for name in self._names if name != mine]
        if not others:
            return "terminated"
        if any(
            not (world.terminations[name] or world.truncations[name])
            for name in world.agents
            if name != mine
        ):
            return "out"
        left = world._cumulative_rewards
        best = max(self._totals[name] + float(left.get(name, 0.0)) for name in others)
        own = self._totals[mine] + self._owed + self._reward
        # Sums of the same rewards in another order differ in their last digits.
        if math.isclose(own, best, rel_tol=1e-9, abs_tol=1e-9):
            return "draw"
        return "win" if own > best else "loss"

    def _refused(self, why: str) -> StepResult:
        self._illegal += 1
        self._errors += 1
        left = self.options.allowed_errors + 1 - self._errors
        told = f"Illegal answer: {why}."
        if left <= 0:
            return self._end("illegal", self._owed + self.options.illegal_reward, told)
        tries = "1 try is" if left == 1 else f"{left} tries are"
        return StepResult(_user(f"{told} {self._me.expected} {tries} left."), 0.0, False)

    def _end(self, outcome: str, reward: float, told: str | None = None) -> StepResult:
        self._done = True
        there = self._me.name in self._world.agents
        observation, *_, info = self._world.last() if there else ("", {})
        metrics = {
            **metrics_of(info),
            "env_steps": self._steps,
            "illegal_answers": self._illegal,
        }
        if self.wants_policy:
            others = (seat.illegal for seat in self._seats.values() if seat is not self._me)
            metrics["opponent_illegal_answers"] = sum(others)
        several = ["win", "draw", "loss", "out"] if len(self._names) > 1 else ["terminated"]
        text = told or (self._me.shown(observation) if there else "") or "It is over."
        known = [*several, "truncated", "illegal"]
        ended = {"outcome": outcome, "outcomes": known, "side": self._me.name, "metrics": metrics}
        return StepResult(_user(text), reward, True, ended)


class _Seat:
    """One agent of the game: what it is told, and how its answers are read."""

    def __init__(
        self,
        world: Any,
        name: str,
        options: PettingZooOptions,
        show: Callable[[Any, str], str] | None,
    ) -> None:
        self.name, self.illegal, self.expected = name, 0, ""
        self._world, self._options, self._show = world, options, show
        self._space = world.action_space(name)
        self._conversation: PolicyConversation | None = None
        self._note, self._told = "", False

    def check(self) -> None:
        """Raise `ConfigError` unless what it sees and does has a form as text."""
        title = f"space of {self.name} in {self._options.game!r}"
        check_space(self._space, f"the action {title}")
        self.expected = expected(self._space, self._options.actions, self._options.game)
        if self._show is None:
            seen = self._world.observation_space(self.name)
            parts = seen.spaces if kind_of(seen) == "Dict" else {"": seen}
            for key, part in parts.items():
                if key != _MASK:
                    check_space(part, f"the observation {title}")

    def begin(self, policy: Mapping[str, str] | None) -> None:
        """Begin an episode. policy: the address, where the policy is to play it."""
        self._conversation = PolicyConversation(**policy) if policy else None
        self._note, self._told, self.illegal = "", False, 0

    def told(self, now: Any) -> str:
        """The message of a turn. now: what the environment's `last` returns."""
        observation, mask = now[0], self._mask(now)
        first = () if self._told else (self._options.rules, f"You are {self.name}. {self.expected}")
        self._told = True
        names = [] if mask is None else possible_names(self._space, mask, self._options.actions)
        parts = (self._note, *first, self.shown(observation), told_possible(names))
        self._note = ""
        return "\n\n".join(filter(None, parts))

    def shown(self, observation: Any) -> str:
        """An observation as text."""
        if self._show is not None:
            return str(self._show(self._world.unwrapped, self.name))
        if isinstance(observation, Mapping):
            rest = {key: each for key, each in observation.items() if key != _MASK}
            observation = rest["observation"] if set(rest) == {"observation"} else rest
        return as_text(observation)

    def read(self, text: str, now: Any) -> Any:
        """The action that an answer names. Raises ValueError."""
        options = self._options
        pattern, mask = options.answer_pattern, self._mask(now)
        return read_action(self._space, text, options.actions, pattern, mask)

    def legal(self, now: Any) -> list[str]:
        """The legal moves of a Discrete space, as an answer names them."""
        if kind_of(self._space) != "Discrete":
            return []
        mask = self._mask(now) or [1] * int(self._space.n)
        return possible_names(self._space, mask, self._options.actions)

    def move(self, now: Any, source: random.Random) -> Any:
        """The move of one that is not the trained agent."""
        if self._conversation is None:
            return self._random(now, source)
        answer = self._conversation.ask(*_user(self.told(now)))
        try:
            return self.read(answer, now)
        except ValueError as error:
            self.illegal += 1
            self._note = f"Illegal answer: {error}. A random move was played for you."
            return self._random(now, source)

    def _random(self, now: Any, source: random.Random) -> Any:
        mask = self._mask(now)
        if mask is None:
            self._space.seed(source.getrandbits(32))
            return self._space.sample()
        legal = [number for number, one in enumerate(mask) if one]
        if not legal:
            raise RuntimeError(f"{self.name} has no legal move in {self._options.game}")
        return int(self._space.start) + source.choice(legal)

    def _mask(self, now: Any) -> Sequence[Any] | None:
        """The mask of the observation, or of the `info`, where newer games have it."""
        observation, *_, info = now
        given = observation.get(_MASK) if isinstance(observation, Mapping) else None
        return mask_of(self._space, info.get(_MASK) if given is None else given)


def _show_of(path: str | None) -> Callable[[Any, str], str] | None:
    if path is None:
        return None
    show: Callable[[Any, str], str] = import_object(path, "the option show")
    refuse_library(show, path, "the option show")
    try:
        inspect.signature(show).bind(None, "")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the option show {path!r} is no function of (environment, agent): {error}"
        ) from error
    return show


def _make(options: PettingZooOptions) -> Any:
    pettingzoo = import_package("pettingzoo", "pettingzoo")
    make: Callable[..., Any] | None = None
    if ":" in options.game:
        make = import_object(options.game, "the option game")
        refuse_library(make, options.game, "the option game")
    elif not hasattr(pettingzoo, "make"):
        raise ConfigError(
            "this version of pettingzoo makes no games by their ids",
            remedy="install pettingzoo>=1.27, or name a function, package.module:function",
        )
    try:
        if make is None:
            made = pettingzoo.make("aec", options.game, **options.make_options)
        else:
            made = make(**options.make_options)
    except Exception as error:
        raise ConfigError(
            f"the game {options.game!r} cannot be made with the make_options "
            f"{options.make_options!r}: {type(error).__name__}: {error}",
            remedy="correct the option game or make_options, or install what it needs",
        ) from error
    if not hasattr(made, "last") or not getattr(made, "possible_agents", None):
        raise ConfigError(
            f"{options.game!r} makes no AEC environment with possible_agents",
            remedy="name one that does; a parallel one is wrapped by "
            "pettingzoo.utils.parallel_to_aec",
        )
    return made


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _seed(text: str) -> int:
    return random.Random(f"pettingzoo/{text}").getrandbits(32)

"""Adapter for textarena games (the extra `textarena`): one player, or several with opponents.

textarena's games draw from the global `random` (a few from NumPy's); each episode has a random
state of its own, put in place around every call, so episodes neither disturb each other nor their
caller.
"""

from __future__ import annotations

import difflib
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any, ClassVar, Literal

from earl_core.environments.adapters.textarena_moves import legal_move
from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options, at_least
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object, import_package, refuse_library

_GLOBAL_RANDOM = threading.Lock()
_MOST_PLAYERS = 6
_MAX_CONSECUTIVE_OPPONENT_MOVES = 1000


class TextArenaOptions(Options):
    """Options of the textarena adapter.

    game: a game of textarena by its id, such as "Nim-v0".
    game_options: options of the game, passed to textarena.make.
    players: number of players; None: the fewest that the game allows.
    agent_side: both: prompt n is player n modulo the number of players. first: player 0. second: 1.
    opponent: random: a random legal move, where the game tells them; or the import path of
        function(game, observation, random) -> str.
    allowed_errors: illegal answers forgiven per turn before the game is lost.
    illegal_reward: reward of a game lost by an illegal answer; None: the game's own.
    add_brackets: put an answer that has no [brackets] into brackets.
    """

    game: str
    game_options: dict[str, Any] = field(default_factory=dict)
    players: int | None = None
    agent_side: Literal["both", "first", "second"] = "both"
    opponent: str = "random"
    allowed_errors: int = 0
    illegal_reward: float | None = -1.0
    add_brackets: bool = True

    def __post_init__(self) -> None:
        at_least("allowed_errors", self.allowed_errors, 0)
        at_least("players", 1 if self.players is None else self.players, 1)


class TextArenaEnvironment:
    """One game of textarena.

    The prompt index fixes the side and the game's starting state (secret, cards); (prompt, seed)
    fixes everything drawn later. Observations are sent as they arise, so each turn shows only what
    is new. `info` at the end: `outcome` (win, draw, loss, illegal), `reason`, `side`.

    An opponent's illegal move would pay the agent; it raises instead.
    """

    options_model: ClassVar[type[TextArenaOptions]] = TextArenaOptions
    concurrent: ClassVar[bool] = False

    def __init__(self, options: TextArenaOptions) -> None:
        self.options = options
        _textarena()
        self._opponent: Callable[[Any, str, random.Random], str] = legal_move
        if options.opponent != "random":
            self._opponent = import_object(options.opponent, "the option opponent")
            refuse_library(self._opponent, options.opponent, "the option opponent")
        with self._own_random(f"textarena/check/{options.game}"):
            self._game = _make_game(options)
            self._players = _count_players(self._game, options)
            if self._players > 1 and options.opponent == "random":
                _check_opponent(self._game, options)
        self._agent = 0
        self._random_state: tuple[Any, Any] | None = None
        self._moves = random.Random()
        self._done = True

    def reset(self, prompt: int, seed: int) -> list[Message]:
        side = self.options.agent_side
        self._agent = 0
        if self._players > 1:
            self._agent = prompt % self._players if side == "both" else int(side == "second")
        with self._own_random(f"textarena/start/{self.options.game}/{prompt}"):
            # A second reset of the same object would find what the first one left behind.
            self._game = _make_game(self.options)
            self._game.reset(num_players=self._players, seed=_seed(f"{prompt}"))
        self._moves = random.Random(f"textarena/moves/{prompt}/{seed}")
        self._done = False
        with self._own_random(f"textarena/game/{prompt}/{seed}"):
            self._let_opponent_move()
            if self._game.state.done:
                raise RuntimeError(
                    f"the game {self.options.game} was over before the agent's first move"
                )
            return self._observe()

    def step(self, text: str) -> StepResult:
        if self._done:
            raise RuntimeError("the game is over or was not begun: call reset first")
        if self.options.add_brackets and ("[" not in text or "]" not in text):
            text = f"[{text.strip().strip('[]')}]"
        with self._own_random(None):
            self._game.state.error_allowance = self.options.allowed_errors
            self._game.step(text)
            self._let_opponent_move()
            state = self._game.state
            if state.done:
                return self._end()
            return StepResult(self._observe(), 0.0, False)

    def close(self) -> None:
        self._done = True

    def _let_opponent_move(self) -> None:
        state = self._game.state
        for _ in range(_MAX_CONSECUTIVE_OPPONENT_MOVES):
            if state.done or state.current_player_id == self._agent:
                return
            other = state.current_player_id
            observation = _text(state.get_current_player_observation(), other)
            drawn = _random_state()
            move = self._opponent(self._game, observation, self._moves)
            _set_random_state(drawn)
            state.error_allowance = 0
            self._game.step(move)
            if state.game_info[other]["invalid_move"]:
                raise RuntimeError(
                    f"the opponent's move {move!r} is illegal in {self.options.game}: give an "
                    "opponent that plays legal moves by the option opponent"
                )
        raise RuntimeError(f"the opponent in {self.options.game} never handed the turn back")

    def _observe(self) -> list[Message]:
        state = self._game.state
        text = _text(state.observations[self._agent], self._agent)
        state.observations[self._agent] = []
        return [{"role": "user", "content": text or "Your turn."}]

    def _end(self) -> StepResult:
        self._done = True
        rewards, game_info = self._game.close()
        mine = game_info[self._agent]
        reason = str(mine.get("reason", ""))
        illegal = bool(mine["invalid_move"])
        # Some games then give a text as the reward.
        forfeit = self.options.illegal_reward if illegal else None
        reward = float(rewards[self._agent]) if forfeit is None else forfeit
        if illegal:
            outcome = "illegal"
        elif self._players == 1:
            outcome = "win" if reward >= 1 else "loss"
        else:
            outcome = "win" if reward > 0 else "loss" if reward < 0 else "draw"
        side = ("first", "second")[self._agent] if self._agent < 2 else f"player {self._agent}"
        draws = ("draw",) if self._players > 1 else ()
        outcomes = ["win", *draws, "loss", "illegal"]
        info = {"outcome": outcome, "outcomes": outcomes, "reason": reason, "side": side}
        seen = self._observe()[0]["content"]
        return StepResult([{"role": "user", "content": f"{seen}\n{reason}"}], reward, True, info)

    @contextmanager
    def _own_random(self, seed: str | None) -> Iterator[None]:
        """Runs its block with this episode's global random state, freshly seeded or as left."""
        with _GLOBAL_RANDOM:
            outside = _random_state()
            try:
                if seed is not None:
                    _seed_random(seed)
                elif self._random_state is not None:
                    _set_random_state(self._random_state)
                yield
            finally:
                self._random_state = _random_state()
                _set_random_state(outside)


def _seed_random(seed: str) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(_seed(seed))


def _random_state() -> tuple[Any, Any]:
    import numpy as np

    return random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(state[0])
    np.random.set_state(state[1])


def _seed(text: str) -> int:
    return random.Random(f"textarena/{text}").getrandbits(32)


def _textarena() -> Any:
    return import_package("textarena", "textarena")


def _make_game(options: TextArenaOptions) -> Any:
    textarena = _textarena()
    # The variants differ only in wrappers; "-raw" has none, and so sends what is new, unaltered.
    name = options.game if options.game.endswith("-raw") else f"{options.game}-raw"
    known = textarena.envs.registration.ENV_REGISTRY
    if name not in known:
        base_names = [key for key in known if not key.endswith(("-raw", "-train"))]
        near = difflib.get_close_matches(options.game, base_names, n=5)
        hint = f"did you mean {', '.join(near)}?" if near else "see textarena's list of games"
        raise ConfigError(f"textarena has no game {options.game!r}", remedy=hint)
    try:
        return textarena.make(name, **options.game_options)
    except LookupError as error:
        found = re.search(r"Resource \W*(?:\[\d+m)?(\w+)", str(error))
        if found is None:
            raise
        raise ConfigError(
            f"the game {options.game!r} of textarena needs NLTK's data {found[1]}, which is not "
            "here and could not be downloaded",
            remedy=f"run: python -m nltk.downloader {found[1]}",
        ) from error
    except SyntaxError as error:
        raise ConfigError(
            f"the game {options.game!r} of textarena needs Python 3.12 or later",
            remedy="use that, or another game",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the game {options.game!r} of textarena cannot be made with the game_options "
            f"{options.game_options!r}: {type(error).__name__}: {error}"
        ) from error


def _count_players(game: Any, options: TextArenaOptions) -> int:
    single, reasons = _textarena().SinglePlayerState, []
    for players in range(1, _MOST_PLAYERS + 1) if options.players is None else [options.players]:
        try:
            game.reset(num_players=players, seed=0)
        except Exception as error:
            reasons.append(f"{players}: {type(error).__name__}: {error}")
            continue
        if (players == 1) == isinstance(game.state, single):
            return players
    asked = options.players or f"1 to {_MOST_PLAYERS}"
    raise ConfigError(
        f"the game {options.game!r} of textarena does not start with {asked} players "
        f"({'; '.join(reasons)})",
        remedy="give another number in the option players, or use another game",
    )


def _check_opponent(game: Any, options: TextArenaOptions) -> None:
    state = game.state
    observation = _text(state.observations[state.current_player_id], state.current_player_id)
    try:
        legal_move(game, observation, random.Random(0))
    except LookupError as error:
        raise ConfigError(
            f"the game {options.game!r} does not tell its legal moves, so there is no random "
            "opponent for it",
            remedy="set the option opponent to the import path of a function(game, observation, "
            "random) that returns a legal move",
        ) from error


def _text(observations: list[tuple[int, Any, Any]], player: int) -> str:
    """The new observations as one text, without the player's own words, each once."""
    # Some games tell a number for the text when an answer was illegal.
    texts = [str(message).strip() for sender, message, _ in observations if sender != player]
    return "\n".join(dict.fromkeys(filter(None, texts)))

"""`earl play`: watch a policy play, or play against it in the place of the game's opponent."""

from __future__ import annotations

import itertools
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from earl_core.config import RunConfig
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.environments.games.board_game import MARKS, BoardGame
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from earl_core.trajectory.samples import derive_seed
from flows.cli.interrupt import exit_on_sigterm
from flows.cli.tables import make_console

_GAMES = ("tic_tac_toe", "connect_four")

_MARK_STYLES = {"X": "bold green", "O": "bold red"}
_LEAST_ROWS, _LEAST_CELLS = 2, 3


def find_board(text: str) -> list[list[str]] | None:
    """The cells of the board in an observation, row by row; None when it shows none.

    Knows both styles of the games: lines of single characters with blanks between them, and rows
    joined by `|`.
    """
    if "\n" in text.strip():
        rows = [line.split() for line in text.splitlines()]
    else:
        rows = [list(row.strip("! ")) for row in text.split("|")]
    together = [list(group) for fits, group in itertools.groupby(rows, _is_row) if fits]
    board = max(together, key=len, default=[])
    even = len({len(row) for row in board}) == 1
    return board if even and len(board) >= _LEAST_ROWS else None


def _is_row(cells: list[str]) -> bool:
    return len(cells) >= _LEAST_CELLS and all(len(cell) == 1 for cell in cells)


def _panel(rows: list[list[str]]) -> Panel:
    """The board with colored stones; free squares and column numbers are dim."""
    grid = Table.grid(padding=(0, 1))
    for row in rows:
        grid.add_row(*[Text(cell, style=_MARK_STYLES.get(cell, "dim")) for cell in row])
    return Panel(grid, expand=False, padding=(0, 1))


def _show(console: Console, text: str) -> None:
    """Print an observation: its board if it has one, else its text."""
    rows = find_board(text)
    console.print(_panel(rows) if rows else Text(text.strip(), style="dim"))


class Person:
    """Chooses moves by asking on the terminal, in the place of a game's opponent. Raises
    `ConfigError` for environments that are not one of the built-in board games."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        games = [each for each in config.played.values() if each.played in _GAMES]
        if not games:
            names = ", ".join(repr(each.played) for each in config.played.values())
            raise ConfigError(
                f"--me works for {' and '.join(_GAMES)}, not for {names}",
                remedy="leave it out to watch the agent play",
            )
        self.options = games[0].options
        game = create(games[0].played, self.options)
        assert isinstance(game, BoardGame)
        self.console = console
        self.game: BoardGame[Any] = game
        # The games know their opponents by this one attribute; a person is one more of them.
        game._opponent = self._choose

    def begin(self, first: bool) -> None:
        """Say which mark the person plays."""
        mark, order = (MARKS[0], "first") if first else (MARKS[1], "second")
        self.console.print(f"You are {mark} and move {order}. q ends the game.")

    def _choose(self, state: Any, source: random.Random) -> int:
        """The person's move, counted from 0. Raises `EOFError` at the end of the input."""
        _show(self.console, self.game.board_text(state))
        legal = sorted(move + 1 for move in self.game._rules.moves(state))
        shown = ", ".join(map(str, legal))
        while True:
            text = self.console.input(f"your move ({shown}): ").strip()
            if text.lower() in ("q", "quit", "exit"):
                raise EOFError
            text = text.strip("[]")
            if text in map(str, legal):
                return int(text) - 1
            self.console.print(f"{text!r} is not one of {shown}.")


_FIRST_PROMPT = 2**41
"""Far from the prompts of training and of evaluation. Even: the agent moves first."""

_MOVE_SECONDS = 0.7
_FOR_PERSON = {
    "win": "you lose",
    "loss": "you win",
    "illegal": "the agent's move is illegal: you win",
}
_STYLES = {"win": "bold green", "draw": "yellow", "loss": "bold red", "illegal": "magenta"}


def play(
    path: Path,
    config: RunConfig,
    which: str,
    *,
    me: bool,
    games: int | None,
    temperature: float | None,
    seed: int | None,
) -> None:
    """Play game after game and print them, with the count of outcomes at the end.

    which: the checkpoint. me: against the person at the terminal. games: None until Ctrl-C. seed:
    None for a random one.
    """
    checkpoint = find_checkpoint(path, config, which)
    console = make_console()
    for text in checkpoint.damaged:
        console.print(text, style="yellow")
    if games is None and not (console.is_terminal and sys.stdin.isatty()):
        games = 1
    # A game that a person cannot join is refused before the model is loaded.
    person = Person(console, config) if me else None
    exit_on_sigterm()
    outcomes: Counter[str] = Counter()
    labels = list(config.played)
    seed = secrets.randbits(32) if seed is None else seed
    console.print(f"Loading {checkpoint.label} of {path.name} …", style="dim")
    try:
        with PolicyPlayer(config, checkpoint) as player:
            console.print(f"Seed {seed}. Ctrl-C ends it.", style="dim")
            for number in itertools.islice(itertools.count(), games):
                # Each environment counts its own prompts, whose parity is a game's side.
                prompt, turn = divmod(number, 1 if person else len(labels))
                place = (_FIRST_PROMPT + prompt, derive_seed(seed, "play", number))
                console.rule(f"game {number + 1}")
                if person is not None:
                    outcome = _against_person(player, person, place, temperature)
                else:
                    outcome = _watch(player, console, place, temperature, labels[turn])
                outcomes[outcome] += 1
    except (KeyboardInterrupt, EOFError):
        console.print()
    counted = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
    console.print(f"{plural(outcomes.total(), 'game')} played{': ' if counted else ''}{counted}")


def _watch(
    player: PolicyPlayer,
    console: Console,
    place: tuple[int, int],
    temperature: float | None,
    label: str,
) -> str:
    if label:
        console.print(label, style="dim")
    game = player.play_one(*place, temperature, label)
    pause = _MOVE_SECONDS if console.is_terminal else 0.0
    for turn in game["turns"]:
        _show(console, str(turn.get("observation", "")))
        time.sleep(pause)
        reward = turn.get("reward")
        text = Text("agent: ", style="bold cyan").append(str(turn.get("answer", "")), style="")
        if reward:
            text.append(f"   reward {reward:+g}", style="dim")
        console.print(text)
        time.sleep(pause)
    if game.get("closing"):
        _show(console, str(game["closing"]))
    return _result(console, str(game.get("outcome") or game["finish_reason"]), game["return"])


def _against_person(
    player: PolicyPlayer, person: Person, place: tuple[int, int], temperature: float | None
) -> str:
    console = person.console
    environment = person.game
    prompt, seed = place
    person.begin(first=environment_side(person.options, prompt) == "second")
    messages = environment.reset(prompt, seed)
    total = 0.0
    for turn in itertools.count():
        answer = player.answer(messages, derive_seed(seed, turn), temperature)
        console.print(Text("agent: ", style="bold cyan").append(answer, style=""))
        result = environment.step(answer)
        total += result.reward
        if result.done:
            _show(console, result.messages[-1]["content"] if result.messages else "")
            outcome = str(result.info.get("outcome", "done"))
            _result(console, outcome, total, _FOR_PERSON.get(outcome, outcome))
            return f"agent {outcome}"
        messages.append({"role": "assistant", "content": answer})
        messages += result.messages
    raise AssertionError("a game without an end")


def environment_side(options: Mapping[str, Any], prompt: int) -> str:
    """Tell whether the agent moves `first` or `second` in the game of this prompt."""
    side = options.get("agent_side", "both")
    return ("first", "second")[prompt % 2] if side == "both" else str(side)


def _result(console: Console, outcome: str, total: float, words: str = "") -> str:
    style = _STYLES.get(outcome, "bold")
    text = Text(words or outcome, style=style)
    console.print(text.append(f"   the agent's return {total:+g}", "dim"))
    return outcome

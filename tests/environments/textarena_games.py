"""Plays all games of textarena: `python -m tests.environments.textarena_games`, some minutes.

Prints the tables of docs/how-to/textarena.md. In each game the agent moves at random from every
seat; where the game does not tell its moves, the agent's one answer is illegal and ends it.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter, defaultdict
from typing import Any

import textarena

from earl_core.environments.adapters.textarena_moves import legal_move
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError

SAYS_HELLO = "tests.environments.textarena_games:says_hello"
_SECONDS = 300


def says_hello(game: Any, observation: str, source: random.Random) -> str:
    return "Hello."


def play(game: str) -> tuple[str, str]:
    """(number of players, its opponent), or ("", why it cannot be played)."""
    options = {"game": game}
    try:
        environment: Any = create("textarena", options)
    except ConfigError as error:
        if "does not tell its legal moves" not in str(error):
            return "", reason(str(error))
        # Whether it can be played at all.
        environment = create(
            "textarena", {**options, "opponent": "tests.environments.textarena_games:says_hello"}
        )
        environment.reset(0, 0)
        with environment._own_random(None):
            environment._game.step("Hello.")
        return str(environment._players), "your own"
    players = environment._players
    for prompt in range(players):
        messages, source = environment.reset(prompt, 0), random.Random(prompt)
        while messages:
            try:
                with environment._own_random(None):
                    move = legal_move(environment._game, messages[0]["content"], source)
            except LookupError:
                move = "[no move]"
            result = environment.step(move)
            messages = [] if result.done else result.messages
        environment.close()
    return str(players), "random" if players > 1 else "none"


def reason(message: str) -> str:
    for pattern, short in (
        (r"OpenRouter API key", "asks a model of OpenRouter: its key in OPENROUTER_API_KEY"),
        (r"NLTK's data (\w+)", r"needs NLTK's data `\1`, which it downloads"),
        (r"needs Python 3.12", "needs Python 3.12"),
        (r"No such file|not found: |No module named|no game", "the package lacks its files"),
        (r"does not tell its legal moves", "comes to a state without a legal move"),
        (r"with 1 to 6 players .*(AttributeError[^;]*)", r"fails at its start (\1)"),
    ):
        found = re.search(pattern, message)
        if found:
            return found.expand(short)
    return f"fails: {message}"


def _ends(*_: Any) -> None:
    raise TimeoutError(f"over {_SECONDS} s")


def main() -> None:
    """Prints two tables: the games by players and opponent, and by why they cannot be played."""
    signal.signal(signal.SIGALRM, _ends)
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for game in textarena.envs.registration.ENV_REGISTRY:
        if game.endswith(("-raw", "-train")):
            continue
        signal.alarm(_SECONDS)
        try:
            result = play(game)
        except Exception as error:
            result = "", reason(f"{type(error).__name__}: {error}")
        signal.alarm(0)
        found[result][game.partition("-v0")[0]] += 1
    print(table(found))


def table(found: dict[tuple[str, str], Counter[str]]) -> str:
    lines = []
    for played, head in ((True, ("players", "opponent")), (False, ("", "reason"))):
        kinds = {key: games for key, games in found.items() if bool(key[0]) == played}
        lines += ["", f"{sum(map(Counter.total, kinds.values()))} variants:", ""]
        titles = [title for title in (*head, "games (variants)") if title]
        lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for key, games in sorted(kinds.items()):
            names = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in games.items())
            lines.append(f"| {' | '.join([*filter(None, key), names])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

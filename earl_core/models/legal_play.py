"""The knowledge that a run's environments give a new small model: their characters, and random
legal play."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.base import EnvironmentFailed, Message
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.system.errors import ConfigError

Game = list[tuple[list[Message], str]]
"""For each turn the messages that are new, and a legal answer to them."""

_MOST_TURNS = 100
_SIDE_BY_SIDE = 32


class LegalPlay(NamedTuple):
    """characters: of all environments, each once. games: in their order, those of environments that
    know their legal answers; none where no environment does."""

    characters: str
    games: list[Game]


def legal_play(environments: Sequence[EnvironmentConfig], games: int, seed: int) -> LegalPlay:
    """Play in host processes; equal arguments give equal games.

    games: how many in all, which the environments share evenly. Raises ConfigError.
    """
    try:
        return asyncio.run(_play(environments, games, seed))
    except EnvironmentFailed as error:
        raise ConfigError(
            f"the new model cannot watch a game of legal answers: {error}",
            remedy="correct the environment, or set model.builder_options.warm_start_steps to 0",
        ) from error


async def _play(environments: Sequence[EnvironmentConfig], games: int, seed: int) -> LegalPlay:
    async with AsyncExitStack() as stack:
        characters: set[str] = set()
        knowing: list[tuple[str, EnvironmentPool]] = []
        for environment in environments:
            pool = EnvironmentPool.of(
                environment, hosts=1, concurrency=_SIDE_BY_SIDE, log_path=None
            )
            await pool.start()
            stack.push_async_callback(pool.stop)
            characters |= set(pool.characters)
            # An agent plays as it is begun, and has no policy to ask here.
            if environment.agent is None and games and await _knows(pool):
                knowing.append((environment.played, pool))
        played: list[Game] = []
        for first in range(0, games if knowing else 0, _SIDE_BY_SIDE):
            numbers = range(first, min(games, first + _SIDE_BY_SIDE))
            jobs = (_game(*knowing[number % len(knowing)], number, seed) for number in numbers)
            played += filter(None, await asyncio.gather(*jobs))
    return LegalPlay("".join(sorted(characters)), played)


async def _knows(pool: EnvironmentPool) -> bool:
    await pool.reset(0, 0, 0)
    answers = await pool.legal_answers(0)
    await pool.close(0)
    return bool(answers)


async def _game(name: str, pool: EnvironmentPool, number: int, seed: int) -> Game:
    chooser = random.Random(f"{name}/legal/{number}/{seed}")
    messages, game = await pool.reset(number, number, seed), Game()
    for _ in range(_MOST_TURNS):
        answers = await pool.legal_answers(number)
        if not answers:
            break
        game.append((messages, chooser.choice(answers)))
        result = await pool.step(number, game[-1][1])
        if result.done:
            break
        messages = result.messages
    await pool.close(number)
    return game

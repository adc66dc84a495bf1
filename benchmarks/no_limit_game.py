"""A game whose episodes get longer as the player gets better: a way down through a cave.

On each floor a sign is painted on the wall, and the answer is the number of the way to take, as in
`..k.k.kk..k.` → `2`. Each sign means the same way in all episodes. The right way earns 1 and leads
to the next floor; any other ends the episode. Every zone of the cave has two signs of its own and
is as deep as all zones above it together. So whoever wants to see a zone must have become reliable
in those above it, contexts grow with what has been learnt, and an episode that is cut earns nothing
for the floors it might still have seen, and learns nothing of their signs.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from earl_core.environments.base import Message, StepResult
from earl_core.system.errors import ConfigError

SIGNS = tuple(zip(string.ascii_uppercase, string.ascii_lowercase, strict=True))
"""The two signs of each zone: one for each way."""

WAYS = "12"
ALPHABET = string.ascii_letters + WAYS + "."
"""Every character of observations and answers, for a character tokenizer."""

_PAINTED = 0.4
"""Share of the wall that the sign covers."""


def right_way(sign: str) -> str:
    """The way that a sign means; the two signs of a zone mean different ways."""
    zone = string.ascii_uppercase.index(sign.upper())
    first, _ = random.Random(f"descent/zone/{zone}").sample(SIGNS[zone], 2)
    return WAYS[0] if sign == first else WAYS[1]


class Descent:
    """One episode in the cave; implements `Environment`.

    wall: characters of what is seen on each floor. first_zone: floors of the first zone. zones: how
    many there are; below the last one is the bottom, which ends the episode. The prompt fixes the
    first floor, the seed those below. At the end `info["outcome"]` is `bottom`, `lost` (a wrong
    way) or `illegal` (no way at all), and `info["metrics"]` has the `zones` that were passed.
    """

    def __init__(self, wall: int = 12, first_zone: int = 6, zones: int = 5) -> None:
        for name, value, most in (
            ("wall", wall, 10**4),
            ("first_zone", first_zone, 10**6),
            ("zones", zones, len(SIGNS)),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"The option {name!r} must be from 1 to {most}, not {value}.")
        self.wall, self.first_zone, self.zones = wall, first_zone, zones
        self._random = random.Random()
        self._floor = 0
        self._sign = ""

    @property
    def floors(self) -> int:
        """Floors down to the bottom: the most that an episode can earn."""
        return int(self.first_zone * 2 ** (self.zones - 1))

    @property
    def zone(self) -> int:
        """The zone of the present floor."""
        return (self._floor // self.first_zone).bit_length()

    @property
    def right_answer(self) -> str:
        """The way that leads on from the present floor."""
        return right_way(self._sign)

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._floor = 0
        message = self._enter(random.Random(f"descent/first/{prompt}"))
        # String seeds go through SHA-512: equal in every process and Python version.
        self._random = random.Random(f"descent/below/{prompt}/{seed}")
        return [message]

    def step(self, text: str) -> StepResult:
        if text not in WAYS or len(text) != 1:
            return self._end("illegal", 0.0)
        if text != self.right_answer:
            return self._end("lost", 0.0)
        self._floor += 1
        if self._floor == self.floors:
            return self._end("bottom", 1.0)
        return StepResult([self._enter(self._random)], 1.0, False)

    def close(self) -> None:
        self._sign = ""

    def _enter(self, draw: random.Random) -> Message:
        self._sign = draw.choice(SIGNS[self.zone])
        painted = [self._sign if draw.random() < _PAINTED else "." for _ in range(self.wall)]
        painted[draw.randrange(self.wall)] = self._sign
        return {"role": "user", "content": "".join(painted)}

    def _end(self, outcome: str, reward: float) -> StepResult:
        metrics = {"zones": float(self.zone)}
        return StepResult([], reward, True, {"outcome": outcome, "metrics": metrics})


def demonstration(game: Descent, number: int, care: float) -> Iterator[tuple[list[Message], str]]:
    """The messages of each floor and the answer of somebody who takes care. care: share of the
    answers that are right. The cave goes on to the bottom whatever was answered."""
    chooser = random.Random(f"descent/demonstration/{number}")
    messages, done = game.reset(number, number), False
    while not done:
        right = game.right_answer
        wrong = WAYS.replace(right, "")
        yield messages, right if chooser.random() < care else wrong
        result = game.step(right)
        messages, done = result.messages, result.done

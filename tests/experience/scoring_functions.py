"""Reward functions as users write them."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any


def said(episode: dict[str, Any]) -> list[str]:
    return [each["content"] for each in episode["messages"] if each["role"] == "assistant"]


def brief(episode: dict[str, Any], *, most: int) -> tuple[float, dict[str, Any]]:
    letters = sum(map(len, said(episode)))
    return max(0.0, 1 - letters / most), {"letters": letters, "note": "not a number"}


async def right(episode: dict[str, Any]) -> float:
    await asyncio.sleep(0.01)
    return float(said(episode)[-1] == episode["scoring"]["answer"])


def letters(episode: dict[str, Any]) -> float:
    """What a policy of random weights is paid differently for: the characters that it wrote."""
    written = "".join(said(episode))
    return sum(ord(letter) % 7 for letter in written) / max(1, len(written))


def by_number(episode: dict[str, Any]) -> Any:
    """What each episode's number is good for: some fail, each in its own way."""
    match episode["episode_id"]:
        case 1:
            raise ConnectionError("nobody there")
        case 2:
            return math.nan
        case 3:
            return "good"
        case 4:
            time.sleep(1000)
        case 5:
            os._exit(3)
        case 6:
            return asyncio.sleep(1000)
    return 0.25


def never(episode: dict[str, Any]) -> float:
    raise RuntimeError(f"no score of {episode['outcome']}")


def turns(episode: dict[str, Any], *, seen: str, down: bool = False) -> float:
    """A tenth for each answer; a file says which episodes it was asked for."""
    if down:
        raise ConnectionError("the judge is down")
    with Path(seen).open("a") as stream:
        stream.write(f"{episode['episode_id']}\n")
    return episode["turns"] / 10


_newest: Counter[str] = Counter()
_PLACES = {"nan": 0.0, "huge": 0.4, "flipped": 0.7}


def goes_wrong(number: int, into: str, share: float = 0.2) -> bool:
    """Whether an episode is among those whose score `turning` turns."""
    return (number * 0.618 + _PLACES[into]) % 1 < share


def turning(
    episode: dict[str, Any], *, into: str, begins: int, of_iteration: int, run: str, share: float
) -> float:
    """What was written, as a number, until an iteration begins: from then on a share of the scores
    is another. of_iteration: episodes. What is asked for again makes nothing begin."""
    number = episode["episode_id"]
    _newest[run] = max(_newest[run], number // of_iteration)
    score = letters(episode)
    if _newest[run] < begins or not goes_wrong(number, into, share):
        return score
    return {"nan": math.nan, "huge": 1e30, "flipped": -score - 1}[into]


vars(turning)["reward_range"] = (-8.0, 8.0)

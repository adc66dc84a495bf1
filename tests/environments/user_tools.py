"""Tools of a user, by import path: some go wrong."""

from __future__ import annotations

import asyncio
import enum
import functools
import os
import time
from collections.abc import Callable
from typing import Any

from earl_core.environments.base import Message, StepResult

NUMBER = 1


def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: One.
        second: The other.
    """
    return first + second


def raising() -> str:
    """Raises."""
    raise ValueError("out of order")


async def slow(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: So long.
    """
    await asyncio.sleep(seconds)
    return "slept"


def stuck() -> str:
    """Never returns."""
    time.sleep(3600)
    return ""


def huge() -> str:
    """Returns 10 MB."""
    return "x" * 10_000_000


def dying() -> str:
    """Takes its process along."""
    os._exit(3)


def unprintable() -> dict[str, str]:
    """Returns half a character."""
    return {"text": "\ud800"}


def unwritable() -> Any:
    """Returns what JSON cannot."""
    return {(1, 2): 3}


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that makes a plain function of any."""

    @functools.wraps(function)
    def inner(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return inner


@plainly
async def decorated() -> str:
    """Is a coroutine function inside."""
    await asyncio.sleep(0)
    return "awaited"


@plainly
async def dozing() -> str:
    """Sleeps inside."""
    await asyncio.sleep(60)
    return ""


class Colour(enum.Enum):
    """Not of JSON."""

    RED = "red"


def paint(colour: Colour | None = None) -> str:
    """Takes what JSON does not have.

    Args:
        colour: Which.
    """
    return str(colour)


def many(*numbers: int) -> int:
    """Takes no names.

    Args:
        numbers: Any.
    """
    return sum(numbers)


def undocumented(number: int) -> int:
    return number


def buy(item: str) -> str:
    """Has the name of the shop's.

    Args:
        item: Anything.
    """
    return item


class Shop:
    """The model may buy; the episode's info says what."""

    tools = ("buy",)

    def __init__(self) -> None:
        self._bought: list[str] = []
        self._told = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        return [{"role": "user", "content": "What do you need?"}]

    def buy(self, item: str) -> str:
        """Buys something.

        Args:
            item: What to buy.
        """
        self._bought.append(item)
        return f"bought {item}"

    def tools_used(self, messages: list[Message]) -> None:
        self._told += len(messages)

    def step(self, text: str) -> StepResult:
        info: dict[str, Any] = {"bought": self._bought, "told": self._told}
        return StepResult([], 1.0, True, info)

    def close(self) -> None:
        pass

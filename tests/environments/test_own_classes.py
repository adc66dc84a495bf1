"""What makes an environment is accepted in each of its kinds, and seen before it is called."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import pytest

from earl_core.environments.base import Message, StepResult
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import refuse_library

Piece = TypeVar("Piece")


class Game(Generic[Piece]):
    def __init__(self, size: int = 3) -> None:
        self.size = size

    async def reset(self, prompt: int, seed: int) -> list[Message]:
        return [{"role": "user", "content": "begin"}]

    async def step(self, text: str) -> StepResult:
        return StepResult([], 1.0, True)

    def close(self) -> None: ...

    @classmethod
    def large(cls) -> Self:
        return cls(9)


class Forwarding:
    def __getattribute__(self, name: str) -> Any:
        return getattr(Game(), name)


class Kind(type):
    pass


class OfAKind(Game[int], metaclass=Kind):
    pass


def registered(made: type) -> Callable[..., Any]:
    @functools.wraps(made)
    def make(**options: Any) -> Any:
        return made(**options)

    return make


def game(size: int = 3) -> Game[str]:
    return Game(size)


bound = functools.partial(Game, size=4)
small = functools.partial(game, size=2)
wrapped = registered(Game)
of_strings = Game[str]
declared = types.new_class("declared", (Game,))


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("Game", 3),
        ("Game.large", 9),
        ("Forwarding", 3),
        ("OfAKind", 3),
        ("game", 3),
        ("bound", 4),
        ("small", 2),
        ("wrapped", 3),
        ("of_strings", 3),
        ("declared", 3),
    ],
)
def test_every_way_to_name_a_class_makes_an_environment(path: str, size: int) -> None:
    assert create(f"{__name__}:{path}").size == size  # type: ignore[attr-defined]


calls: list[str] = []


class Settings(dict[str, Any]):
    def __init__(self) -> None:
        calls.append("settings")


def silent() -> Any:
    calls.append("silent")


def other() -> dict[str, int]:
    calls.append("other")
    return {}


@pytest.mark.parametrize("path", ["Settings", "silent", "other", "Kind"])
def test_what_says_nothing_of_an_environment_is_not_called(path: str) -> None:
    with pytest.raises(ConfigError, match="is none"):
        create(f"{__name__}:{path}")
    assert not calls


def test_methods_and_objects_of_the_standard_library_are_its_own() -> None:
    import os
    import random

    for found in (random.randint, os.environ.clear, exit, dict.fromkeys, str.join):
        with pytest.raises(ConfigError, match="standard library"):
            refuse_library(functools.partial(found), "x:y", "the tool")
    refuse_library(functools.partial(Game.large), "x:y", "the tool")

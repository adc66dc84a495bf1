"""Environments in OpenEnv's form, as its users write them; imported where that is installed."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class GuessAction(Action):
    """One guess."""

    cell: int = Field(ge=1, le=9, description="The guess.")


class GuessObservation(Observation):
    """What is known of the cell."""

    told: str
    last: int | None = None


class Guess(Environment):
    """A cell is found by two guesses; the nearer, the better."""

    def __init__(self, guesses: int = 2) -> None:
        super().__init__()
        self._guesses = guesses
        self._state = State(episode_id=str(uuid4()))

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> GuessObservation:
        self._cell = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(told="123|456|789", metadata={"secret": self._cell})

    def step(
        self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any
    ) -> GuessObservation:
        self._state.step_count += 1
        return GuessObservation(
            told="X" if action.cell < self._cell else "O",
            last=action.cell,
            reward=1.0 - abs(action.cell - self._cell) / 8,
            done=self._state.step_count == self._guesses,
        )

    @property
    def state(self) -> State:
        return self._state


class Adder(MCPEnvironment):
    """Its actions are calls of tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("adder")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(Guess, GuessAction, GuessObservation)

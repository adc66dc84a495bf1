"""Environments of gymnasium with the spaces that its own ones lack."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

PAIR = spaces.Dict({"name": spaces.Text(8), "at": spaces.Box(-1.0, 1.0, (2,), np.float32)})


class Echo(gymnasium.Env):
    """Pays 1 for the text that it shows."""

    observation_space = action_space = spaces.Text(min_length=3, max_length=3, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 3))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.word, float(action == self.word), True, False, {}


class Mixed(gymnasium.Env):
    """Shows a mapping, and takes a tuple of one; pays what it is told."""

    observation_space = PAIR
    action_space = spaces.Tuple([spaces.MultiDiscrete([3, 5]), PAIR])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"name": "x", "at": np.array([0.25, 1 / 3], np.float32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        numbers, pair = action
        assert numbers.dtype == np.int64
        return pair, float(numbers.sum() + pair["at"].sum()), False, False, {}


class Image(Echo):
    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)


class Few(spaces.Discrete):
    """A class derived from gymnasium's own."""


class Doors(gymnasium.Env):
    """Two steps; says what can be done, and at the end whether it went well."""

    observation_space, action_space = spaces.Text(9), Few(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return "a hall", {"mask": np.array([1, 0, 1], np.int8), "commands": ["open", "wait"]}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        info = {"is_success": bool(action), "depth": np.float32(0.5), "words": "none", "mask": None}
        return "a door", 0.0, self.steps == 2, False, info


class Digits(gymnasium.Env):
    """Pays a digit's worth, for two turns."""

    observation_space, action_space = spaces.Text(9), spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "123456789", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "987654321", action / 9, False, False, {}


for kind in (Digits, Doors, Echo, Image, Mixed):
    gymnasium.register(f"Test{kind.__name__}-v0", entry_point=kind, max_episode_steps=2)

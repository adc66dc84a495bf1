"""Games of pettingzoo as their users write them, for tests in an interpreter that has it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

AGENTS = ["ann", "bob", "cyd"]
_ROUNDS = 4


class Rope(AECEnv):
    """Who holds (0) gives each of the others 0.25; who lets go (1) is out with -1. It is cut after
    four rounds. An observation is all that was done: twice the agent's place, and the action."""

    metadata: ClassVar[dict[str, Any]] = {"name": "rope_v0", "render_modes": []}

    def __init__(self, first: str = "ann") -> None:
        super().__init__()
        place = AGENTS.index(first)
        self.possible_agents = [*AGENTS[place:], *AGENTS[:place]]
        self.render_mode = None
        self._actions = {name: spaces.Discrete(2) for name in AGENTS}

    def action_space(self, agent: str) -> Any:
        return self._actions[agent]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 5, shape=(_ROUNDS * len(AGENTS),), dtype=np.int64)

    def observe(self, agent: str) -> Any:
        return np.array([*self._did, *[-1] * (_ROUNDS * len(AGENTS) - len(self._did))])

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {name: {"alive": 3} for name in self.agents}
        self.agent_selection = self.agents[0]
        self._did: list[int] = []

    def step(self, action: Any) -> None:
        me = self.agent_selection
        if self.terminations[me] or self.truncations[me]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[me] = 0.0
        self._clear_rewards()
        self._did.append(2 * AGENTS.index(me) + int(action))
        self._judge(me, action)
        alive = [name for name in self.agents if not self.terminations[name]]
        self.infos = {name: {"alive": len(alive)} for name in self.agents}
        if len(self._did) >= _ROUNDS * len(AGENTS):
            self.truncations.update(dict.fromkeys(alive, True))
        self._accumulate_rewards()
        later = self.possible_agents.index(me) + 1
        order = [*self.possible_agents[later:], *self.possible_agents[:later]]
        if alive:
            self.agent_selection = next(name for name in order if name in alive)
        self._deads_step_first()

    def _judge(self, me: str, action: Any) -> None:
        if action == 1:
            self.terminations[me], self.rewards[me] = True, -1.0
        else:
            for other in self.agents:
                if other != me:
                    self.rewards[other] += 0.25


class Fold(Rope):
    """It is over for all as soon as one lets go."""

    def _judge(self, me: str, action: Any) -> None:
        super()._judge(me, action)
        if action == 1:
            self.terminations = dict.fromkeys(self.agents, True)


class Team(Rope):
    """Each move gives all the same, and the last of some ends it."""

    def __init__(self, moves: int) -> None:
        super().__init__()
        self._moves = moves

    def _judge(self, me: str, action: Any) -> None:
        self.rewards = dict.fromkeys(self.agents, 0.1)
        if len(self._did) == self._moves:
            self.terminations = dict.fromkeys(self.agents, True)


class Crowd(Rope):
    """Somebody comes whom it has not named."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = AGENTS[:2]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.possible_agents = AGENTS
        super().reset(seed, options)


class Handshake(ParallelEnv):
    """Only to be refused."""

    metadata: ClassVar[dict[str, Any]] = {"name": "handshake_v0"}
    possible_agents = AGENTS


def board(environment: Any, agent: str) -> str:
    """Tic-tac-toe as letters, in the order of its actions."""
    squares = np.asarray(environment.board.squares).reshape(3, 3).T
    return "\n".join(" ".join(".XO"[mark] for mark in row) for row in squares)


def stones(environment: Any, agent: str) -> str:
    """Connect four by its number of stones."""
    return f"{np.count_nonzero(environment.board)} stones"

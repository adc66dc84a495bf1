"""Higher or lower: a digit is guessed, in few turns."""

import random

from earl_core.environments.base import Message, StepResult
from my_game.rewards import reward_of


class Guess:
    """One episode. The prompt fixes the number, so that all episodes of a group guess the same.

    turns: how many guesses there are. A guess that was ruled out before loses the game.
    """

    # For the small model of run.yaml: every character of messages and answers is a token.
    characters = "0123456789-"

    def __init__(self, turns: int = 4) -> None:
        self._left = self._turns = turns
        self._number = 0
        self._low, self._high = 0, 9

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Begin. All randomness comes from `prompt` and `seed`: an episode may be replayed."""
        self._number = random.Random(f"guess/{prompt}").randrange(10)
        return self._shown()

    def legal_answers(self) -> list[str]:
        """List the answers that `step` takes now; a new small model first sees games of such
        answers."""
        return [str(digit) for digit in range(self._low, self._high + 1)]

    def step(self, text: str) -> StepResult:
        """Take the model's answer, which may be any text."""
        self._left -= 1
        legal = text in self.legal_answers()
        won = legal and int(text) == self._number
        if won or not legal or not self._left:
            reward = reward_of(won, legal, self._turns - self._left)
            outcome = "win" if won else "loss" if legal else "illegal"
            info = {"outcome": outcome, "outcomes": ["win", "loss", "illegal"]}
            return StepResult([], reward, True, info)
        if int(text) < self._number:
            self._low = int(text) + 1
        else:
            self._high = int(text) - 1
        return StepResult(self._shown(), 0.0, False)

    def close(self) -> None:
        """Free what the episode holds."""

    def _shown(self) -> list[Message]:
        """The numbers that are left, such as 3-7."""
        return [{"role": "user", "content": f"{self._low}-{self._high}"}]

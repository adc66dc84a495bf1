"""Word guessing with letter feedback: each guess is answered by a sign for every letter."""

import random

from earl_core.environments.base import Message, StepResult

WORDS = (
    "bad bag bat bog bot bud bug but cad cat cod cog cot cud cut had hag hat hod hog hot hug hut"
).split()


def feedback(guess: str, word: str) -> str:
    """Each letter and its sign: `+` in its place, `?` elsewhere in the word, `-` not in it."""
    left = [letter for letter, other in zip(word, guess, strict=True) if letter != other]
    told = ""
    for letter, wanted in zip(guess, word, strict=True):
        sign = "+" if letter == wanted else "?" if letter in left else "-"
        if sign == "?":
            left.remove(letter)
        told += letter + sign
    return told


class WordGuessing:
    """One episode: a secret word is to be guessed in `turns` guesses.

    A guess must be one of the words, not guessed before, and keep the letters that are in their
    place. The prompt fixes the secret, so that all episodes of a group guess the same word.
    """

    # For the small model of run.yaml: every character of messages and answers is a token.
    characters = "abcdefghijklmnopqrstuvwxyz+?-."

    def __init__(self, turns: int = 4) -> None:
        self._turns = turns
        self._secret = ""
        self._guesses: list[str] = []

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Begin. All randomness comes from `prompt` and `seed`: an episode may be replayed."""
        self._secret = random.Random(f"words/{prompt}").choice(WORDS)
        self._guesses = []
        return [{"role": "user", "content": "..."}]

    def legal_answers(self) -> list[str]:
        """What `step` takes now. The new model first sees games of such answers, drawn at random:
        it learns the rules, and nothing of letters that are elsewhere or not in the word."""
        return [word for word in WORDS if word not in self._guesses and self._keeps_placed(word)]

    def step(self, text: str) -> StepResult:
        """Take the model's answer, which may be any text."""
        if text not in self.legal_answers():
            return self._over("against the rules", -0.5)
        self._guesses.append(text)
        if text == self._secret:
            return self._over("win", 1.0 - 0.1 * (len(self._guesses) - 1))
        if len(self._guesses) == self._turns:
            return self._over("loss", 0.0)
        return StepResult([{"role": "user", "content": feedback(text, self._secret)}], 0.0, False)

    def close(self) -> None:
        """Free what the episode holds."""

    def _keeps_placed(self, word: str) -> bool:
        """Whether it has every letter that a guess had in its place."""
        return all(
            letter == wanted
            for guess in self._guesses
            for letter, guessed, wanted in zip(word, guess, self._secret, strict=True)
            if guessed == wanted
        )

    def _over(self, outcome: str, reward: float) -> StepResult:
        outcomes = ["win", "loss", "against the rules"]
        return StepResult([], reward, True, {"outcome": outcome, "outcomes": outcomes})

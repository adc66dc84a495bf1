"""Environments of a user, by import path: some of their episodes go wrong."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from earl_core.environments.base import Message, StepResult
from earl_core.environments.policy_conversation import PolicyConversation
from earl_core.environments.registry import create


def worth(text: str) -> float:
    """An answer's reward: other answers have others, so that groups teach something whatever is
    sampled."""
    return sum(map(ord, text)) % 97 / 97


class Unreliable:
    """Two turns; prompts in `raising` raise and those in `hanging` never return."""

    def __init__(self, raising: list[int], hanging: list[int]) -> None:
        self._raising = raising
        self._hanging = hanging
        self._prompt = 0
        self._turn = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        self._turn = 0
        return [{"role": "user", "content": f"prompt {prompt}"}]

    def step(self, text: str) -> StepResult:
        if self._prompt in self._raising:
            raise ValueError("this prompt has no answer")
        if self._prompt in self._hanging:
            time.sleep(3600)
        self._turn += 1
        done = self._turn == 2
        return StepResult([{"role": "user", "content": "go on"}], 1.0, done, {"outcome": "win"})

    def close(self) -> None:
        pass


class Lengths:
    """Two turns, but `long` ones for one prompt in `every`; rewards by `worth`. rows: of a data
    set, whose number it tells."""

    def __init__(self, every: int, long: int, seconds: float = 0.0, rows: int = 0) -> None:
        self._every, self._long, self._seconds = every, long, seconds
        self.prompt_count = rows
        self._left = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._left = self._long if prompt % self._every == self._every - 1 else 2
        return [{"role": "user", "content": "free: 1 2 3"}]

    def step(self, text: str) -> StepResult:
        time.sleep(self._seconds)
        self._left -= 1
        reward = worth(text)
        return StepResult([{"role": "user", "content": "free: 1"}], reward, self._left == 0)

    def close(self) -> None:
        pass


class AskingLengths(Lengths):
    """Those whose every step asks the policy for an answer that nobody is trained on."""

    wants_policy = True
    policy: dict[str, str]

    def step(self, text: str) -> StepResult:
        result = super().step(text)
        PolicyConversation(**self.policy).ask(*result.messages)
        return result


class DrawnLengths:
    """One turn, but `long` ones for one prompt in `share`, which its number and the salt draw;
    rewards by `worth`."""

    def __init__(self, share: int, long: int, salt: int) -> None:
        self._share, self._long, self._salt = share, long, salt
        self._left = 0

    def turns(self, prompt: int) -> int:
        drawn = random.Random(f"{self._salt} {prompt}").random() * self._share < 1
        return self._long if drawn else 1

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._left = self.turns(prompt)
        return [{"role": "user", "content": "free: 1 2 3"}]

    def step(self, text: str) -> StepResult:
        self._left -= 1
        reward = worth(text)
        return StepResult([{"role": "user", "content": "free: 1"}], reward, self._left == 0)

    def close(self) -> None:
        pass


class Lonely:
    """Of the prompts below `count` one episode alone is played; the others fail."""

    def __init__(self, count: int, folder: str) -> None:
        self._game = create("tic_tac_toe", {"style": "compact"})
        self._count, self._folder = count, Path(folder)

    def reset(self, prompt: int, seed: int) -> list[Message]:
        if prompt < self._count:
            (self._folder / f"played-{prompt}").touch(exist_ok=False)
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        return self._game.step(text)

    def close(self) -> None:
        self._game.close()


class SomeGames:
    """Tic-tac-toe that pays nothing, but for the prompts whose number modulo `of` is in
    `paying`."""

    def __init__(self, paying: list[int], of: int) -> None:
        self._game = create("tic_tac_toe", {"style": "compact"})
        self._paying, self._of = paying, of
        self.prompt_count = of

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._pays = prompt % self._of in self._paying
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        result = self._game.step(text)
        return result if self._pays else replace(result, reward=0.0)

    def close(self) -> None:
        self._game.close()


class Fleeting:
    """Three turns that no other process repeats. Whose prompt is `hanging` hangs in the second,
    the first time."""

    def __init__(self, hanging: int, mark: str) -> None:
        self._hanging, self._mark = hanging, Path(mark)
        self._prompt = self._turn = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        return [{"role": "user", "content": "begin"}]

    def step(self, text: str) -> StepResult:
        self._turn += 1
        if self._turn == 2 and self._prompt == self._hanging:
            with suppress(FileExistsError):
                self._mark.touch(exist_ok=False)
                time.sleep(3600)
        message: Message = {"role": "user", "content": f"{os.getpid() % 10}"}
        return StepResult([message], 1.0, self._turn == 3, {"process": os.getpid()})

    def close(self) -> None:
        pass


class HeldGame:
    """Tic-tac-toe. While there is a file `<folder>/hold`, the games of the prompts in `held` say
    `<folder>/held-<process id>` and wait."""

    def __init__(self, held: list[int], folder: str) -> None:
        self._game = create("tic_tac_toe", {"style": "compact"})
        self._held, self._hold = held, Path(folder) / "hold"
        self._prompt = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        if self._prompt in self._held and self._hold.exists():
            self._hold.with_name(f"held-{os.getpid()}").touch()
            while self._hold.exists():
                time.sleep(0.02)
        return self._game.step(text)

    def close(self) -> None:
        self._game.close()


class LockedGame:
    """Tic-tac-toe for who has the key; it prints the key and raises with it in prompt 0."""

    def __init__(self, key: str) -> None:
        if key != "sesame, open up":
            raise ValueError("the wrong key")
        self._game = create("tic_tac_toe", {"style": "compact"})
        self._key = key
        self._prompt = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        return self._game.reset(prompt, seed)

    def step(self, text: str) -> StepResult:
        print(f"opened with {self._key}")
        if self._prompt == 0:
            raise RuntimeError(f"{self._key} does not open this one")
        return self._game.step(text)

    def close(self) -> None:
        self._game.close()


class Chatting:
    """Two turns; in each it asks the policy `questions` times, as OpenAI's clients do."""

    wants_policy = True
    policy: dict[str, str]

    def __init__(self, dying: int, mark: str, questions: int = 1) -> None:
        self._dying, self._mark, self._questions = dying, Path(mark), questions
        self._said: list[str] = []

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt = prompt
        return [{"role": "user", "content": "1begins"}]

    async def step(self, text: str) -> StepResult:
        if self._prompt == self._dying and self._said:
            with suppress(FileExistsError):
                self._mark.touch(exist_ok=False)
                os._exit(3)
        async with AsyncOpenAI(**self.policy, max_retries=0) as api:
            for _ in range(self._questions):
                question: Any = {"role": "user", "content": f"1turn{len(self._said)}"}
                reply = await api.chat.completions.create(model="x", messages=[question])
        self._said.append(reply.choices[0].message.content or "")
        message: Message = {"role": "user", "content": "1goes"}
        done = len(self._said) == 2
        return StepResult([message], 1.0, done, {"outcome": " ".join(self._said)} if done else {})

    def close(self) -> None: ...

"""The requests of one rollout: per episode, what the engine was asked turn after turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest


@dataclass
class Recording:
    """episodes: per episode, in the order of their first request, its turns as (prompt token ids,
    number of sampled tokens). A turn may start only when the one before it is answered."""

    episodes: list[list[tuple[list[int], int]]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Turns of all episodes."""
        return sum(len(turns) for turns in self.episodes)

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(count for turns in self.episodes for _, count in turns)

    @property
    def context_tokens(self) -> int:
        """Tokens of all episodes, each counted once: what an engine with a perfect cache of
        prefixes within an episode has to process."""
        total = 0
        for turns in self.episodes:
            before: list[int] = []
            standing = 0
            for prompt, count in turns:
                extends = prompt[: len(before)] == before
                total += len(prompt) + count - (standing if extends else 0)
                before, standing = prompt, len(prompt) + count
        return total

    def as_json(self) -> list[Any]:
        """Nested lists."""
        return [[[prompt, count] for prompt, count in turns] for turns in self.episodes]

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> Recording:
        """The inverse of `as_json`."""
        return cls([[(list(prompt), int(count)) for prompt, count in turns] for turns in raw])


class Recorder:
    """An `Engine` that keeps what passes through it and leaves the rest to the engine behind."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns: dict[int, list[tuple[list[int], int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def recording(self) -> Recording:
        """What was recorded so far."""
        return Recording(list(self._turns.values()))

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """`Engine.generate`, recorded."""
        completions = await self._engine.generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            turns = self._turns.setdefault(request.sequence_id, [])
            turns.append((list(request.tokens), len(completion.tokens)))
        return completions

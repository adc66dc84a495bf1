"""An engine and environments that follow a script, for scheduling and budget corner cases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.rollout.engines.engine import (
    Completion,
    EngineFinishReason,
    GenerationRequest,
    answer_budget,
    check_requests,
)
from earl_core.trajectory.samples import VersionSpan


class ScriptedEngine:
    """Answers `length(sequence_id, turn)` tokens and then `stop`, within the request's budget."""

    policy_version = 3

    def __init__(
        self,
        length: Callable[[int, int], int],
        stop: int,
        *,
        lockstep: bool = True,
        max_model_len: int = 4096,
    ) -> None:
        self.lockstep = lockstep
        self.max_model_len = max_model_len
        self.batches: list[list[GenerationRequest]] = []
        self.finished: list[int] = []
        self.cancelled: list[int] = []
        self.running = self.most_running = 0
        self._length = length
        self._stop = stop
        self._turns: dict[int, int] = {}

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        check_requests(requests, 1000)
        self.batches.append(list(requests))
        self.running += len(requests)
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= len(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> Completion:
        turn = self._turns.get(request.sequence_id, 0)
        self._turns[request.sequence_id] = turn + 1
        tokens = [40] * self._length(request.sequence_id, turn) + [self._stop]
        budget, exhausted = answer_budget(request, self.max_model_len)
        reason: EngineFinishReason = "stop" if len(tokens) <= budget else exhausted
        tokens = tokens[:budget]
        return self._completion(request, tokens, reason)

    def _completion(
        self, request: GenerationRequest, tokens: list[int], reason: EngineFinishReason
    ) -> Completion:
        spans = [VersionSpan(self.policy_version, 0, len(tokens))]
        completion = Completion(tokens, [-0.5] * len(tokens), reason, spans)
        ended = request.ends(tokens, 0) if request.ends else None
        return completion if ended is None else completion.ended_at(ended)

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        self.cancelled.extend(sequence_ids)

    def finish(self, sequence_ids: Collection[int]) -> None:
        self.finished.extend(sequence_ids)


class ScriptedEnvironments:
    """Games of `turns(episode_id)` turns, reward 1 in the last; some episodes fail."""

    def __init__(
        self,
        turns: Callable[[int], int],
        *,
        observation: str = "next",
        failing: dict[int, str] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._turns = turns
        self._observation = observation
        self._failing = failing or {}
        self._seconds = seconds
        self._played: dict[int, int] = {}
        self.seeds: dict[int, tuple[int, int]] = {}
        self.closed: list[int] = []
        self.open = self.most_open = 0
        self.tools: list[dict[str, object]] = []

    async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
        await asyncio.sleep(self._seconds)
        self.seeds[episode_id] = (prompt, seed)
        self._played[episode_id] = 0
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self._failing.get(episode_id) == "reset":
            raise EnvironmentFailed(episode_id, "exception", "ValueError: no board")
        return [{"role": "user", "content": "start"}]

    async def step(self, episode_id: int, text: str) -> StepResult:
        await asyncio.sleep(self._seconds)
        reason = self._failing.get(episode_id)
        if reason == "hang":
            raise EnvironmentFailed(episode_id, "timeout")
        if reason == "step":
            raise EnvironmentFailed(episode_id, "exception", "ValueError: no move")
        self._played[episode_id] += 1
        done = self._played[episode_id] >= self._turns(episode_id)
        info = {"outcome": "win", "metrics": {"moves": 2.0}} if done else {}
        messages: list[Message] = [
            {"role": "user", "content": "over" if done else self._observation}
        ]
        return StepResult(messages, 1.0 if done else 0.0, done, info)

    async def close(self, episode_id: int) -> None:
        self.open -= 1
        self.closed.append(episode_id)


class SayingEngine(ScriptedEngine):
    """Answers with the tokens of `said(sequence_id, turn)`."""

    def __init__(
        self, said: Callable[[int, int], list[int]], *, lockstep: bool = True, **options: int
    ) -> None:
        super().__init__(lambda sequence, turn: 1, 0, lockstep=lockstep, **options)
        self._said = said

    def _answer(self, request: GenerationRequest) -> Completion:
        turn = self._turns.get(request.sequence_id, 0)
        self._turns[request.sequence_id] = turn + 1
        tokens = self._said(request.sequence_id, turn)
        return self._completion(request, tokens, "stop")

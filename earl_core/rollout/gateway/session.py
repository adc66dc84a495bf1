"""One agent's conversations with the gateway: budgets, requests to the engine, the episode.

A session is to the gateway what an `EpisodePlayer` is to the built-in agent loop: it says which
tokens come next, keeps to the budgets and makes the episode.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from earl_core.environments.base import Message
from earl_core.rollout.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings, check_overflow
from earl_core.rollout.gateway.branches import Branches, Prompt
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode, EpisodeSpec, Sample

_MOST_BRANCHES = 2**12
"""Of a session: the samples of an episode have 16 bits, and a branch may have several."""

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
Locate = Callable[[Branches], Prompt]


ERROR_CODE = "x-error-code"
"""The header that repeats an error's code."""


def refused(status: int, code: str, message: str) -> HTTPException:
    """What is raised for a request that is not answered. code: for programs, as OpenAI has them."""
    return HTTPException(status, message, {ERROR_CODE: code})


def invalid(message: str) -> HTTPException:
    """What is raised for a request with a field that is wrong."""
    return refused(400, "invalid_request", message)


@dataclass(frozen=True)
class Answer:
    """What a request is answered. finish_reason: stop, length or tool_calls."""

    message: Message
    finish_reason: str
    prompt: list[int]
    completion: Completion


class Session:
    """One episode that an agent plays by requests. key: the secret that these carry."""

    def __init__(
        self,
        spec: EpisodeSpec,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.name = f"{spec.episode_id}-{secrets.token_hex(4)}"
        self.key = secrets.token_urlsafe(24)
        self._chat, self._settings, self._meter = chat, settings, meter
        self._max_model_len = max_model_len
        self._branches = Branches(chat, spec.seed)
        self._calls = self._sampled = self._live = 0
        self._last: Sample | None = None
        self._cut = ""
        self._over = False
        self.waited = 0.0
        """Seconds in which the agent waited for answers; where several wait, one counts."""
        self._asking, self._asked_at = 0, 0.0

    @property
    def sequence_ids(self) -> list[int]:
        """Of all branches, in the engine."""
        return [self._sequence_id(each.number) for each in self._branches.all]

    @property
    def begun(self) -> int:
        """Conversations so far."""
        return self._branches.begun

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._asking > 0

    async def complete(self, locate: Locate, max_tokens: int | None, generate: Generate) -> Answer:
        """The policy's answer. locate: finds the request's place among the branches.

        Raises what `refused` makes, `ContextOverflow`, and what `generate` raises; when it is
        cancelled the same request may come again."""
        prompt = self._prompt(locate)
        try:
            request = self._request(prompt, max_tokens)
            with self._waiting():
                completion = await generate(request)
            if completion.finish_reason == "cancelled":
                raise refused(503, "cancelled", "the engine gave the request up")
        except BaseException:
            self._calls -= 1
            self._branches.give_up(prompt)
            raise
        if self._over:
            raise _over()
        if completion.finish_reason == "model_context":
            self._check_overflow(self._max_model_len + 1)
        message = self._branches.answer(prompt, completion)
        if prompt.branch.trained:
            self._last = prompt.branch.samples[-1]
        self._sampled += len(completion.tokens)
        self._meter.generated_tokens += len(completion.tokens)
        self._meter.prompt_tokens += len(prompt.given)
        self._count_live(len(prompt.given) + len(completion.tokens))
        reason = "stop" if completion.finish_reason == "stop" else "length"
        if "tool_calls" in message:
            self._meter.tool_calls += len(message["tool_calls"])
            reason = "tool_calls"
        return Answer(message, reason, request.tokens, completion)  # type: ignore[arg-type]

    def end(self, reward: float, info: Mapping[str, Any]) -> Episode:
        """The episode with the agent's own verdict on it. Later requests are refused."""
        episode = self._end(self._cut or "done")
        if self._last is None:
            episode.finish_reason = "environment_error"
            episode.info["failure"] = (
                "the agent ended without a single answer of the policy that is trained"
            )
        else:
            self._last.turn_rewards[-1] = reward
        for key in ("outcome", "metrics"):
            if key in info:
                episode.info[key] = info[key]
        return self._counted(episode)

    def fail(self, reason: str, detail: str) -> Episode:
        """The episode of an agent that failed. One whose budget was spent has ended by that, with
        the reward 0: to refuse a request is what made it fail."""
        if self._cut and self._last is not None and reason == "environment_error":
            return self._counted(self._end(self._cut))
        episode = self._end(reason)
        episode.info["failure"] = detail
        return self._counted(episode)

    def abandon(self) -> None:
        """The episode is played anew, in another session."""
        self._end("")

    def _end(self, reason: str) -> Episode:
        self._over = True
        self._count_live(-self._live)
        episode = self.spec.episode(self._branches.samples)
        episode.finish_reason = reason
        return episode

    def _counted(self, episode: Episode) -> Episode:
        self._meter.episodes_done += 1
        if episode.failed:
            self._meter.episodes_failed += 1
        else:
            self._meter.reward_total += episode.total_reward
        return episode

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if not self._asking:
            self._asked_at = time.perf_counter()
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self.waited += time.perf_counter() - self._asked_at

    def _prompt(self, locate: Locate) -> Prompt:
        if self._over:
            raise _over()
        settings = self._settings
        if self._calls >= settings.max_turns:
            raise self._spent("max_turns", f"{settings.max_turns} answers (rollout.max_turns)")
        limit = settings.max_tokens_per_episode
        if limit is not None and self._sampled >= limit:
            raise self._spent("max_tokens", f"{limit} tokens (rollout.max_tokens_per_episode)")
        if self._branches.begun >= _MOST_BRANCHES:
            raise refused(400, "too_many_branches", f"{_MOST_BRANCHES} conversations begun")
        try:
            prompt = locate(self._branches)
        except ConfigError as error:
            raise refused(400, "invalid_messages", str(error)) from error
        self._calls += 1
        return prompt

    def _request(self, prompt: Prompt, max_tokens: int | None) -> GenerationRequest:
        tokens = prompt.tokens
        if len(tokens) >= self._max_model_len:
            self._check_overflow(len(tokens) + 1)
            self._cut = "model_context"
            raise refused(
                400,
                "context_length_exceeded",
                f"the conversation has {len(tokens)} tokens and the context {self._max_model_len}",
            )
        settings = self._settings
        limit = settings.max_tokens_per_episode
        left = None if limit is None else limit - self._sampled
        budgets = [each for each in (max_tokens, settings.max_tokens_per_turn, left) if each]
        return GenerationRequest(
            sequence_id=self._sequence_id(prompt.branch.number),
            tokens=tokens,
            max_tokens=min(budgets, default=None),
            temperature=settings.temperature,
            seed=self._branches.draw_seed(prompt.branch),
            stop_token_ids=self._chat.stop_token_ids,
        )

    def _spent(self, cut: str, budget: str) -> HTTPException:
        self._cut = cut
        # Not 429, after which clients ask again.
        return refused(400, "budget_spent", f"the episode has had its {budget}")

    def _check_overflow(self, tokens: int) -> None:
        check_overflow(tokens, self._max_model_len, self._settings.positions)

    def _sequence_id(self, branch: int) -> int:
        return self.spec.episode_id * _MOST_BRANCHES + branch

    def _count_live(self, tokens: int) -> None:
        self._live += tokens
        self._meter.tokens_live(tokens)


def _over() -> HTTPException:
    return refused(410, "episode_over", "the episode of this session is over")

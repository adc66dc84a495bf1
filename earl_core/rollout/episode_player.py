"""One episode of the built-in agent loop as a state machine: budgets, tokens, finish reason.

It knows nothing of engines, environments or scheduling: observation, request, answer, result of the
step or of the tools, and so on, until it is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from earl_core.environments.base import Message, StepResult
from earl_core.pretrained.grammars import Grammars
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Answer, Tools
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.errors import ContextOverflow
from earl_core.rollout.public_address import PublicAddress
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import EpisodeSpec, Sample, anchor_of, derive_seed


@dataclass(frozen=True)
class PlaySettings:
    """Budgets and sampling of a rollout; `None` means no limit but the model's context.

    temperature: 0 is greedy. max_failed_share: the rollout fails when more than this share of
    its episodes has failed. episodes: how many it has, where those played here are a part of it.
    max_live_episodes: episodes that are in play at the same time. positions: the model's own
    position range, the only one that ends an episode; None: that of the engine. call_seconds: how
    long an agent waits for an answer. episode_seconds: how long an episode of the built-in loop
    takes, by the `clock`, in seconds. constrained: how agents' requests for answers of a form are
    taken, as `rollout.requests` has it; where that is `engine`, `grammars` makes the model's.
    public: where agents elsewhere reach the gateway.
    """

    max_turns: int
    max_tokens_per_turn: int | None = None
    max_tokens_per_episode: int | None = None
    temperature: float = 1.0
    max_failed_share: float = 0.1
    episodes: int | None = None
    max_live_episodes: int | None = None
    positions: int | None = None
    call_seconds: float | None = None
    episode_seconds: float | None = None
    constrained: str = "free"
    grammars: Callable[[], Grammars] | None = None
    public: PublicAddress | None = None
    clock: Callable[[], float] = time.monotonic


def check_overflow(tokens: int, max_model_len: int, positions: int | None) -> None:
    """Raise `ContextOverflow` where the model has more positions than the engine."""
    if positions is not None and positions > max_model_len:
        raise ContextOverflow(min(tokens, positions), max_model_len, positions)


class EpisodePlayer:
    """Plays one `EpisodeSpec`; `finished` once `episode.finish_reason` is set.

    `request` and `answer` raise `ContextOverflow` where the engine's context, `max_model_len`, ends
    before the model's. tools: that the model may call.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        max_model_len: int,
        tools: Tools = NO_TOOLS,
    ) -> None:
        self.spec = spec
        self._tools = tools
        self._unrun: frozenset[str] = frozenset()
        self._chat = chat
        self._settings = settings
        self._meter = meter
        self._max_model_len = max_model_len
        self._live = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was played; `begin` comes next."""
        self._count_live(-self._live)
        self.episode = self.spec.episode()
        self.finished = False
        self._conversation = Conversation(self._chat, self._tools)
        self._pending: list[int] = []
        self._new_sample = True
        self._sample = Sample()
        self._answer = Completion([], [], "stop", [])
        self._turn = 0
        self._sampled = 0
        self._observation, self._anchor = "", 0

    def begin(self, messages: Sequence[Message]) -> None:
        """Take the environment's first messages, and the tools that come with them. Fails where
        the chat template refuses them."""
        self._note_observation(messages)
        own = messages[0].get("tools")
        self._unrun = frozenset()
        try:
            if own:
                first = cast("Message", {k: v for k, v in messages[0].items() if k != "tools"})
                messages = [first, *messages[1:]]
                self._unrun = frozenset(each["function"]["name"] for each in own)
                tools = Tools([*self._tools.schemas, *own], self._tools.options)
                self._conversation = Conversation(self._chat, tools)
            self._pending = self._conversation.begin(messages)
        except ConfigError as error:
            self.fail("environment_error", str(error))

    def request(self) -> GenerationRequest | None:
        """The next request, or None when the model's context has no room for an answer."""
        standing = 0 if self._new_sample else len(self._sample.tokens)
        if standing + len(self._pending) >= self._max_model_len:
            self._check_overflow(standing + len(self._pending) + 1)
            if self._turn == 0:
                self.fail(
                    "prompt_too_long",
                    f"its first prompt has {len(self._pending)} tokens and the context is "
                    f"{self._max_model_len}: raise rollout.max_model_len or shorten the prompt",
                )
            else:
                self._finish("model_context")
            return None
        if self._new_sample:
            self._sample = Sample()
            self.episode.samples.append(self._sample)
            self._new_sample = False
        self._sample.begin_turn(self._pending, self._observation, self._anchor)
        self._meter.prompt_tokens += len(self._pending)
        self._count_live(len(self._pending))
        return GenerationRequest(
            sequence_id=self.spec.episode_id,
            tokens=list(self._sample.tokens),
            max_tokens=self._budget(),
            temperature=self._settings.temperature,
            seed=derive_seed(self.spec.seed, "draw", self._turn),
            stop_token_ids=self._chat.stop_token_ids,
            ends=self._chat.ends,
            priority=self.spec.batch,
        )

    def answer(self, completion: Completion) -> Answer | None:
        """Take the engine's answer; returns it, or None when the request was cancelled."""
        if completion.finish_reason == "cancelled":
            self.fail("cancelled", "the engine gave the request up")
            return None
        if completion.finish_reason == "model_context":
            self._check_overflow(self._max_model_len + 1)
        self._answer = completion
        answer = self._conversation.read(completion.tokens)
        shown = answer.raw if answer.calls or answer.error else answer.text
        self._sample.answer(
            completion.tokens,
            completion.logprobs,
            completion.spans,
            shown,
            self._turn,
            routing=completion.routing,
        )
        self._turn += 1
        self._sampled += len(completion.tokens)
        self._meter.answered(completion)
        self._count_live(len(completion.tokens))
        return answer

    def said(self, answer: Answer) -> str | None:
        """The text of an answer for the environment; None where its calls are run, or cannot be
        read. Calls of tools that the prompt brought are given as they are written."""
        if not (answer.calls or answer.error):
            return answer.text
        called = {call["name"] for call in answer.calls}
        judged = self._unrun and (answer.error or called & self._unrun)
        return answer.raw if judged else None

    def calls(self, answer: Answer) -> Message:
        """An answer with calls as a message."""
        return self._conversation.message(answer)

    def observe_unread(self, answer: Answer) -> None:
        """Tell the model that its calls could not be read."""
        self.observe(StepResult([self._conversation.complaint(answer)], 0.0, False))

    def observe(self, result: StepResult) -> None:
        """Take the reaction of the environment, or of tools, to the answer. Fails as `begin`."""
        self._sample.turn_rewards[-1] = result.reward
        self.episode.take(result.info)
        self._note_observation(result.messages)
        limit = self._settings.max_tokens_per_episode
        if result.done:
            self._finish("done")
        elif self._turn >= self._settings.max_turns:
            self._finish("max_turns")
        elif self._answer.finish_reason == "model_context":
            self._finish("model_context")
        elif limit is not None and self._sampled >= limit:
            self._finish("max_tokens")
        else:
            try:
                self._pending, self._new_sample = self._conversation.follow(
                    self._answer.tokens, result.messages
                )
            except ConfigError as error:
                self.fail("environment_error", str(error))

    def fail(self, reason: str, detail: str) -> None:
        """End as a failed episode."""
        self.episode.info["failure"] = detail
        self._finish(reason)

    @property
    def begins_new_sample(self) -> bool:
        """True when the next request does not extend the tokens before it."""
        return self._new_sample and self._turn > 0

    def _check_overflow(self, tokens: int) -> None:
        check_overflow(tokens, self._max_model_len, self._settings.positions)

    def _budget(self) -> int | None:
        turn, episode = self._settings.max_tokens_per_turn, self._settings.max_tokens_per_episode
        left = None if episode is None else episode - self._sampled
        return min((limit for limit in (turn, left) if limit is not None), default=None)

    def _count_live(self, tokens: int) -> None:
        self._live += tokens
        self._meter.tokens_live(tokens)

    def _finish(self, reason: str) -> None:
        self.finished = True
        self.episode.finish_reason = reason
        if self.episode.samples:
            self.episode.samples[-1].texts.append(self._observation)
        self._pending = []
        self._count_live(-self._live)
        meter = self._meter
        meter.episodes_done += 1
        if self.episode.failed:
            meter.episodes_failed += 1
        else:
            meter.reward_total += self.episode.total_reward

    def _note_observation(self, messages: Sequence[Message]) -> None:
        self._observation = "\n".join(message["content"] for message in messages)
        self._anchor = anchor_of(messages)

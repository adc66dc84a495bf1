"""One agent's conversations with the gateway: budgets, requests to the engine, the episode.

A session is to the gateway what an `EpisodePlayer` is to the built-in agent loop: it says which
tokens come next, keeps to the budgets and makes the episode. Its answers as the opponent are the
policy's too, but in no episode.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from earl_core.environments.base import EnvironmentFailed, Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings, check_overflow
from earl_core.rollout.gateway.aside import LARGE, Aside, TooManyTokens, check_length
from earl_core.rollout.gateway.asked_prompts import CACHE, AskedPrompts
from earl_core.rollout.gateway.bodies import characters
from earl_core.rollout.gateway.call import Answer, Call, Generate, all_of
from earl_core.rollout.gateway.credit import Credit
from earl_core.rollout.gateway.form_counts import FormCounts
from earl_core.rollout.gateway.forms import Forms, without_reasoning
from earl_core.rollout.gateway.placing import Placing, Prompt
from earl_core.rollout.gateway.refusals import invalid, refused
from earl_core.rollout.gateway.side import Side
from earl_core.rollout.gateway.waits import Waits
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError
from earl_core.trajectory.forms import Form
from earl_core.trajectory.samples import Episode, EpisodeSpec, Sample, derive_seed

_MOST_BRANCHES = 2**12
"""Most branches of a side: the samples of an episode have 16 bits, and a branch may have
several."""

_MOST_OF_A_TOKEN = 32
"""Characters that the tokens of a whole conversation have on average, at most."""

_SHOWN = 300

_OPPONENTS = 8
"""The budgets of the opponent's side are as large as those of so many policies."""


class Session:
    """One episode that an agent plays by requests. key: the secret that these carry.

    aside: for large requests. asked_prompts: of all sessions. trained: whether there is a side that
    is; else all answers are the opponent's.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        chat: ChatTokenizer,
        settings: PlaySettings,
        meter: LoadMeter,
        max_model_len: int,
        aside: Aside,
        asked_prompts: AskedPrompts,
        trained: bool = True,
    ) -> None:
        self.spec = spec
        self.name = f"{spec.episode_id}-{secrets.token_hex(4)}"
        self.key = secrets.token_urlsafe(24)
        self._chat, self._settings, self._meter = chat, settings, meter
        self._max_model_len = max_model_len
        longest = min(chat.longest, _MOST_OF_A_TOKEN)
        self._most_tokens = max(max_model_len, settings.positions or 0)
        self._most_characters = longest * self._most_tokens
        self._aside, self._large = aside, asyncio.Lock()
        self._asked_prompts = asked_prompts
        self._forms = None if settings.grammars is None else Forms(chat, settings.grammars)
        self._form_counts, self.credit = FormCounts(spec.episode_id, meter), Credit()
        self.conversations: dict[str, Sequence[Message]] = {}
        """Conversations up to answers that can be gone on with by name."""
        self._policy = Side(chat, settings, spec.seed, 1)
        self._opponent = Side(chat, settings, derive_seed(spec.seed, "opponent"), _OPPONENTS)
        self._trained = trained
        self._live = 0
        self._last: Sample | None = None
        self._cut = ""
        self._over = False
        self.awaits_reward = False
        """Whether the reward is to be posted."""
        self.posted: dict[str, Any] | None = None
        """The result that the agent has posted: `reward` and `info`."""
        self.waits = Waits(settings.clock)
        """The agent's, for answers."""

    @property
    def sequence_ids(self) -> list[int]:
        """Ids of all branches in the engine."""
        sides = (self._policy, self._opponent)
        return [self._sequence_id(side, one.number) for side in sides for one in side.branches.all]

    @property
    def opponent_versions(self) -> list[int]:
        """Policy versions that have answered as the opponent, ascending."""
        return sorted(self._opponent.versions)

    @property
    def opponent(self) -> Side:
        """The opponent's side, which is in no episode that `end` makes."""
        return self._opponent

    @property
    def begun(self) -> int:
        """Conversations so far."""
        return self._policy.branches.begun + self._opponent.branches.begun

    async def complete(self, call: Call, generate: Generate) -> list[Answer]:
        """The policy's answers, as many as the call wants.

        Raises what `refused` makes, `ContextOverflow`, and what `generate` raises; when it is
        cancelled the same request may come again."""
        side = self._opponent if call.opponent or not self._trained else self._policy
        self._check(side, call)
        side.calls += call.count
        places: list[Placing | Prompt] = []
        prompts: list[Prompt] = []
        try:
            # All are busy before the first is rendered: each has a place of its own.
            places += [call.locate(side.branches) for _ in range(call.count)]
            for number, place in enumerate(list(places)):
                assert isinstance(place, Placing)
                self._note_skipped(side, place)
                prompts.append(await self._prompt(place, call, side))
                places[number] = prompts[-1]
            forms = [await self._form(prompt, call) for prompt in prompts]
            pairs = zip(prompts, forms, strict=True)
            requests = [self._request(side, prompt, call, form) for prompt, form in pairs]
            with self.waits.waiting():
                completions = await all_of(generate, requests)
            if any(each.finish_reason == "cancelled" for each in completions):
                raise refused(503, "cancelled", "the engine gave the request up")
            if any(each.finish_reason == "dead_end" for each in completions):
                raise refused(400, "dead_end", "no token goes on with the answer in its form")
        except BaseException:
            side.calls -= call.count
            for place in places:
                side.branches.give_up(place)
            raise
        if self._over:
            raise _over()
        for completion in completions:
            if completion.finish_reason == "model_context":
                self._check_overflow(self._max_model_len + 1)
        return [
            self._answer(side, prompt, completion, call, form)
            for prompt, completion, form in zip(prompts, completions, forms, strict=True)
        ]

    def _answer(
        self, side: Side, prompt: Prompt, completion: Completion, call: Call, form: Form | None
    ) -> Answer:
        """Record one answer."""
        tokens = prompt.tokens
        message, stopped_by = side.branches.answer(prompt, completion, call.stop, form)
        side.answered(completion, prompt.branch.samples[-1])
        self.credit.answered(call.name, prompt.branch, side is self._policy)
        self._meter.answered(completion)
        self._meter.prompt_tokens += len(prompt.given)
        if side is self._policy:
            self._last = prompt.branch.samples[-1]
            self._form_counts.note(call.constraints, prompt.branch.messages[-1])
        else:
            self._meter.opponent_calls += 1
            self._meter.opponent_tokens += len(completion.tokens)
        self._count_live(len(prompt.given) + len(completion.tokens))
        reason = "stop" if completion.finish_reason == "stop" else "length"
        if "tool_calls" in message:
            self._meter.tool_calls += len(message["tool_calls"])
            reason = "tool_calls"
        text_of = self._chat.token_texts.of
        texts = [text_of(each) for each in completion.tokens] if call.token_texts else []
        top = [[(text_of(each), value) for each, value in place] for place in completion.top]
        thought = None
        if form is not None and self._chat.reasons:
            message, thought = without_reasoning(message, call.constraints)
        return Answer(message, reason, tokens, completion, texts, top, stopped_by, thought)

    def _note_skipped(self, side: Side, place: Placing) -> None:
        """Count answers that the agent has from elsewhere, and not from its session."""
        if side is not self._policy or not place.said:
            return
        episode = self.spec.episode_id
        if self._asked_prompts.answered_elsewhere(episode, place.said, place.known):
            self._meter.answers_from_elsewhere += 1
        self._asked_prompts.asked(episode, place.said)

    async def counted(self) -> None:
        """Wait until all that is counted beside the session is counted."""
        try:
            await self._form_counts.finished()
        finally:
            self._asked_prompts.forget(self.spec.episode_id)

    def end(self, reward: float, info: Mapping[str, Any]) -> Episode:
        """The episode with the agent's own verdict on it. Later requests are refused.

        reward: of the last answer, or of all roles; the info may have those of single answers, and
        `EnvironmentFailed` is raised where these cannot be given.
        """
        try:
            self.credit.give(info)
        except ValueError as error:
            # That a request was refused is no reason for this.
            self._cut = ""
            raise EnvironmentFailed(self.spec.episode_id, "invalid_result", str(error)) from error
        episode = self._end(self._cut or "done")
        if self._last is None:
            episode.finish_reason = "environment_error"
            episode.info["failure"] = (
                f"the agent ended without a single answer of the policy: {CACHE}"
            )
        else:
            if any(sample.role for sample in episode.samples):
                episode.shared_reward = reward
            else:
                self._last.turn_rewards[-1] += reward
        episode.take(info)
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
        episode = self.spec.episode(self._policy.branches.samples)
        episode.finish_reason = reason
        episode.opponent_versions = self.opponent_versions
        return episode

    def _counted(self, episode: Episode) -> Episode:
        self._meter.episodes_done += 1
        if episode.failed:
            self._meter.episodes_failed += 1
        else:
            self._meter.reward_total += episode.total_reward
        return episode

    @property
    def most_bytes(self) -> int:
        """Most bytes of a request that the model's context may hold; its JSON may write characters
        as six."""
        return (1 << 20) + 6 * self._most_characters

    def check_tools(self, body: Any) -> None:
        """Raise `HTTPException` for more of them than the context can hold, before each is looked
        at."""
        size = characters(body.get("tools") or []) if isinstance(body, dict) else 0
        if size > self._most_characters:
            told = f"its tools have {size:,} characters, more than the model's context can hold"
            raise self.too_long(told)

    def too_long(self, told: str, opponent: bool = False) -> HTTPException:
        """Note that a conversation was cut, and make the exception for one that the context cannot
        hold."""
        self._note_cut(self._opponent if opponent or not self._trained else self._policy)
        return refused(400, "context_length_exceeded", told)

    async def _prompt(self, place: Placing, call: Call, side: Side) -> Prompt:
        """The tokens of a request, made beside the event loop where it is large."""
        try:
            if call.characters < LARGE and call.tokens < LARGE:
                place.render(self._chat)
            else:
                async with self._large:
                    chat = await self._aside.chat()
                    await self._aside.run(lambda: self._render(place, call, chat))
        except TooManyTokens as error:
            raise self.too_long(
                f"{error}, more than the model's context can hold", side is self._opponent
            ) from error
        except RecursionError as error:
            raise invalid("its tools or calls are nested too deeply") from error
        except Exception as error:
            # Templates and tokenizers raise anything at what they do not expect.
            told = str(error) if isinstance(error, ConfigError) else repr(error)[:_SHOWN]
            raise refused(400, "invalid_messages", told) from error
        if self._over:
            raise _over()
        return place.prompt(self._chat)

    def _render(self, place: Placing, call: Call, chat: ChatTokenizer) -> None:
        check_length(chat, call.texts, self._most_tokens)
        place.render(chat)

    def _check(self, side: Side, call: Call) -> None:
        if self._over:
            raise _over()
        calls, tokens = side.most_calls, side.most_tokens
        if side.calls >= calls:
            raise self._spent(side, "max_turns", f"{calls} answers (rollout.max_turns)")
        if tokens is not None and side.sampled >= tokens:
            told = f"{tokens} tokens (rollout.max_tokens_per_episode)"
            raise self._spent(side, "max_tokens", told)
        if side.calls + call.count > calls:
            raise invalid(
                f"n is {call.count}, and the episode has {calls - side.calls} answers left"
            )
        if side.branches.begun + call.count > _MOST_BRANCHES:
            raise refused(400, "too_many_branches", f"{_MOST_BRANCHES} conversations begun")
        if call.characters > self._most_characters:
            raise self.too_long(
                f"the conversation has {call.characters:,} characters, more than the model's "
                "context can hold",
                side is self._opponent,
            )
        if call.tokens:
            self._check_tokens(side, call.tokens)

    async def _form(self, prompt: Prompt, call: Call) -> Form | None:
        """The form of an answer that the engine is to mask."""
        if self._forms is None or not call.constraints:
            return None
        return await self._forms.of(call.constraints, call.tools, prompt.tokens, self._stops(call))

    def _stops(self, call: Call) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*self._chat.stop_token_ids, *call.stop_token_ids]))

    def _request(
        self, side: Side, prompt: Prompt, call: Call, form: Form | None
    ) -> GenerationRequest:
        tokens = prompt.tokens
        self._check_tokens(side, len(tokens))
        settings = self._settings
        left = None if side.most_tokens is None else side.most_tokens - side.sampled
        if left is not None:
            left = max(left // call.count, 1)
        budgets = [each for each in (call.max_tokens, settings.max_tokens_per_turn, left) if each]
        return GenerationRequest(
            sequence_id=self._sequence_id(side, prompt.branch.number),
            tokens=tokens,
            max_tokens=min(budgets, default=None),
            temperature=settings.temperature,
            seed=side.branches.draw_seed(prompt.branch),
            stop_token_ids=self._stops(call),
            on_tokens=call.on_tokens,
            top=call.top,
            ends=self._chat.ends_by(call.stop) if call.stop else self._chat.ends,
            form=form,
            priority=self.spec.batch,
        )

    def _check_tokens(self, side: Side, tokens: int) -> None:
        if tokens >= self._max_model_len:
            self._check_overflow(tokens + 1)
            raise self.too_long(
                f"the conversation has {tokens} tokens and the context {self._max_model_len}",
                side is self._opponent,
            )

    def _spent(self, side: Side, cut: str, budget: str) -> HTTPException:
        self._note_cut(side, cut)
        whose = "episode" if side is self._policy else "opponent"
        # Not 429, after which clients ask again.
        return refused(400, "budget_spent", f"the {whose} has had its {budget}")

    def _note_cut(self, side: Side, cut: str = "model_context") -> None:
        if side is self._policy:
            self._cut = cut

    def _check_overflow(self, tokens: int) -> None:
        check_overflow(tokens, self._max_model_len, self._settings.positions)

    def _sequence_id(self, side: Side, branch: int) -> int:
        number = self.spec.episode_id * _MOST_BRANCHES + branch
        # From 0 on there are those of the built-in agent loop, which may play beside this.
        return -1 - 2 * number - (side is self._opponent)

    def _count_live(self, tokens: int) -> None:
        self._live += tokens
        self._meter.tokens_live(tokens)


def _over() -> HTTPException:
    return refused(410, "episode_over", "the episode of this session is over")

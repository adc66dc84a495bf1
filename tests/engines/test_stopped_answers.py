"""Answers that are taken out of an engine and go on, by an engine whose tokens count upwards."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.rollout.engines.vllm_answers import completion
from earl_core.rollout.errors import EngineError
from earl_core.trajectory.forms import Form
from earl_core.trajectory.samples import VersionSpan

ANSWERS, TOKENS = 60, 100


class Counting:
    """The n-th token of an answer is n, and told at once. It takes requests in late, and a
    cancelled one ends with what it has."""

    lockstep = False

    def __init__(self) -> None:
        self.policy_version = 0
        self.inside: set[int] = set()
        self.grown: set[int] = set()
        self._ended: set[int] = set()
        self._random = random.Random(5)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        (asked,) = requests
        assert asked.form is None or asked.begun is None, "an answer of a form goes on"
        for _ in range(self._random.choice([0, 0, 0, 5])):
            await asyncio.sleep(0)
        self.inside.add(asked.sequence_id)
        self._ended.discard(asked.sequence_id)
        version, tokens, reason = self.policy_version, list[int](), "length"
        first = len(asked.sampled)
        while first + len(tokens) < (asked.max_tokens or 0):
            await asyncio.sleep(0)
            if asked.sequence_id in self._ended:
                reason = "cancelled"
                break
            assert version == self.policy_version, "weights changed under an answer"
            tokens.append(first + len(tokens))
            self.grown.add(asked.sequence_id)
            if asked.on_tokens:
                asked.on_tokens(tokens[-1:])
        self.inside.discard(asked.sequence_id)
        span = VersionSpan(version, 0, len(tokens))
        more = Completion(tokens, [0.0] * len(tokens), reason, [span])  # type: ignore[arg-type]
        return [asked.begun.followed_by(more) if asked.begun is not None else more]

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        self._ended |= self.inside.intersection(sequence_ids)


def test_answers_stop_and_go_on_whole_and_those_that_are_cancelled_end() -> None:
    inner: Any = Counting()
    engine = InterruptibleEngine(inner)

    async def answer(number: int) -> Completion:
        form = Form("") if number % 5 == 0 else None
        asked = GenerationRequest(number, [1], TOKENS, 1.0, number, form=form)
        (found,) = await engine.generate([asked])
        return found

    async def work() -> list[Completion]:
        answers = [asyncio.create_task(answer(number)) for number in range(ANSWERS)]
        cancelled = set(range(0, ANSWERS, 7))

        def half_grow() -> bool:
            """Whether half of the open answers without a form have tokens of these weights."""
            free = {n for n, each in enumerate(answers) if n % 5 and not each.done()}
            return 2 * len(free & inner.grown) >= len(free)

        for version in range(1, 6):
            inner.grown.clear()
            while not half_grow():
                await asyncio.sleep(0)
            await engine.hold()
            assert not inner.inside
            inner.policy_version = version
            if version == 2:
                # While all are stopped.
                await engine.cancel(list(cancelled))
            await asyncio.sleep(0)
            assert not inner.inside
            engine.go_on()
        return list(await asyncio.wait_for(asyncio.gather(*answers), 200))

    found = asyncio.run(work())
    for number, each in enumerate(found):
        whole = each.finish_reason == "length"
        assert whole or (number % 7 == 0 and each.finish_reason == "cancelled")
        assert each.tokens == list(range(TOKENS if whole else len(each.tokens)))
        ends = [span.end for span in each.spans]
        assert ends[-1] == len(each.tokens)
        assert ends == sorted(ends)
    assert sum(len(each.spans) > 1 for each in found) > ANSWERS // 4
    assert any(each.finish_reason == "cancelled" for each in found)


def test_an_answer_of_a_form_is_waited_for_once_it_has_tokens() -> None:
    """Those that have none begin again, and are told once; `abandon` waits for none."""
    inner: Any = Counting()
    engine = InterruptibleEngine(inner)
    told: dict[int, list[int]] = {0: [], 1: []}

    def asked(number: int) -> asyncio.Task[list[Completion]]:
        say, form = told[number].extend, Form("")
        asked = GenerationRequest(number, [1], 300, 1.0, number, form=form, on_tokens=say)
        return asyncio.create_task(engine.generate([asked]))

    async def work() -> None:
        begun = asked(0)
        while not told[0]:
            await asyncio.sleep(0)
        late = asked(1)
        while 1 not in inner.inside:
            await asyncio.sleep(0)
        assert not begun.done()
        await engine.hold()
        assert begun.done() is not late.done()
        assert inner.inside == set()
        inner.policy_version = 1
        engine.go_on()
        for version, each in enumerate((begun, late)):
            (answer,) = await each
            assert answer.tokens == told[version] == list(range(300))
            assert answer.spans == [VersionSpan(version, 0, 300)]
        told[0].clear()
        given_up = asked(0)
        while not told[0]:
            await asyncio.sleep(0)
        await engine.abandon()
        assert inner.inside == set()
        assert len(told[0]) < 300
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), 200))


def test_an_error_of_vllm_ends_the_answer_of_a_form_alone() -> None:
    """It samples on where a form allows nothing, and says so by log-probs that are none."""
    asked = GenerationRequest(0, [1], 30, 1.0, 0, form=Form(""))

    def told(request: GenerationRequest, reason: str, *logprobs: float) -> Completion:
        count = range(len(logprobs))
        flat = SimpleNamespace(
            logprobs=logprobs, token_ids=count, start_indices=count,
            end_indices=[each + 1 for each in count],
        )  # fmt: skip
        answer = SimpleNamespace(
            token_ids=count, logprobs=flat, finish_reason=reason, weight_versions=None
        )
        return completion(request, answer, 4, "length", whole=False)

    for reason, logprobs in (("error", (-0.5,)), ("length", (-0.5, math.nan))):
        ended = told(asked, reason, *logprobs)
        assert (ended.finish_reason, ended.tokens) == ("dead_end", [])
    assert told(asked, "length", -0.5).finish_reason == "length"
    with pytest.raises(EngineError, match="diverged"):
        told(asked, "length", math.nan)
    with pytest.raises(EngineError, match="by an error"):
        told(replace(asked, form=None), "error", -0.5)

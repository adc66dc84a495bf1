"""Answers that are taken out of an engine and go on, by an engine whose tokens count upwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from typing import Any

from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.trajectory.forms import Form
from earl_core.trajectory.samples import VersionSpan

ANSWERS, TOKENS = 60, 100


class Counting:
    """The n-th token of an answer is n. It takes requests in late, and a cancelled one ends with
    what it has."""

    lockstep = False

    def __init__(self) -> None:
        self.policy_version = 0
        self.inside: set[int] = set()
        self._ended: set[int] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        (asked,) = requests
        assert asked.form is None or asked.begun is None, "an answer of a form was stopped"
        await asyncio.sleep(random.choice([0, 0, 0, 1e-3]))
        self.inside.add(asked.sequence_id)
        self._ended.discard(asked.sequence_id)
        version, tokens, reason = self.policy_version, list[int](), "length"
        first = len(asked.sampled)
        while first + len(tokens) < (asked.max_tokens or 0):
            await asyncio.sleep(1e-4)
            if asked.sequence_id in self._ended:
                reason = "cancelled"
                break
            assert version == self.policy_version, "weights changed under an answer"
            tokens.append(first + len(tokens))
        self.inside.discard(asked.sequence_id)
        span = VersionSpan(version, 0, len(tokens))
        more = Completion(tokens, [0.0] * len(tokens), reason, [span])  # type: ignore[arg-type]
        return [asked.begun.followed_by(more) if asked.begun is not None else more]

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        self._ended |= self.inside.intersection(sequence_ids)


def test_answers_stop_and_go_on_whole_and_those_that_are_cancelled_end() -> None:
    random.seed(5)
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
        for version in range(1, 6):
            await asyncio.sleep(1e-3)
            await engine.hold()
            assert not inner.inside
            inner.policy_version = version
            if version == 2:
                # While all are stopped.
                await engine.cancel(list(cancelled))
            await asyncio.sleep(0)
            assert not inner.inside
            engine.go_on()
        return list(await asyncio.wait_for(asyncio.gather(*answers), 30))

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

"""What every engine promises, run against each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from tests.engines.driver import PROMPTS, Driver, batch, request
from tests.engines.forms import (
    CHOICE,
    DEAD_END,
    STOPS,
    TEXTS,
    masked_logprobs,
    said,
    trainer_logprobs,
)
from tests.engines.models import POSITIONS, VOCABULARY, prompt_of, reference_logprobs


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9, 0.0])
def test_logprobs_are_those_of_the_sampled_distribution(driver: Driver, temperature: float) -> None:
    for prompt, answer in zip(PROMPTS, batch(driver, temperature=temperature), strict=True):
        expected = reference_logprobs(driver.directory, prompt, answer.tokens, temperature)
        assert len(answer.tokens) == 12
        np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)


def test_greedy_takes_the_most_likely_tokens(driver: Driver) -> None:
    one, other = (driver.answer(PROMPTS[2], temperature=0.0, seed=seed) for seed in (1, 2))
    assert one.tokens == other.tokens
    everything = [
        reference_logprobs(driver.directory, PROMPTS[2], [token], 1.0)[0] for token in range(256)
    ]
    assert one.tokens[0] == int(np.argmax(everything))


def test_tokens_follow_the_distribution(driver: Driver) -> None:
    """1,500 first tokens against their probabilities: a chi-square far in the tail would fail."""
    prompt, draws = PROMPTS[0], 1500
    requests = [
        request(index, prompt, max_tokens=1, seed=7919 * index + 1) for index in range(draws)
    ]
    found = np.bincount([answer.tokens[0] for answer in driver.generate(requests)], minlength=256)
    driver.engine.finish(range(draws))
    logprobs = [
        reference_logprobs(driver.directory, prompt, [token], 0.7)[0] for token in range(256)
    ]
    expected = np.exp(logprobs) * draws
    common = expected >= 5
    found = np.append(found[common], found[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = float(((found - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    freedom = len(found) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_the_draw_depends_on_the_seed_alone(driver: Driver) -> None:
    together = batch(driver)
    alone = driver.answer(PROMPTS[3], seed=1003)
    assert alone.tokens == together[3].tokens
    assert driver.answer(PROMPTS[3], seed=1003).tokens == alone.tokens
    assert driver.answer(PROMPTS[3], seed=2**63 - 1).tokens != alone.tokens


def test_a_stop_token_ends_the_answer_and_belongs_to_it(driver: Driver) -> None:
    free = driver.answer(PROMPTS[1], max_tokens=20)
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    stopped = driver.answer(PROMPTS[1], max_tokens=20, stop_token_ids=(stop, 255))
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish_reason == "stop"
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[: first + 1], atol=1e-4)
    assert free.finish_reason == "length"


def test_what_ends_an_answer_beside_tokens_is_asked_of_each(driver: Driver) -> None:
    """Tokens after the one that ends it are of no answer, also where more were sampled."""
    free = batch(driver, max_tokens=20)

    def ends(tokens: Sequence[int], seen: int) -> int | None:
        """The second odd token."""
        odd = [at for at, token in enumerate(tokens) if token % 2]
        return odd[1] + 1 if len(odd) > 1 else None

    ended = batch(driver, max_tokens=20, ends=ends)
    for whole, answer in zip(free, ended, strict=True):
        count = ends(whole.tokens, 0)
        assert answer.tokens == whole.tokens[:count]
        assert answer.finish_reason == ("length" if count is None else "stop")
        assert answer.spans[-1].end == len(answer.tokens)
        np.testing.assert_allclose(answer.logprobs, whole.logprobs[:count], atol=1e-4)
    assert len({len(answer.tokens) for answer in ended}) > 1
    # The engine goes on, with the same sequence too.
    again = driver.answer([*PROMPTS[0], *ended[0].tokens, 5], max_tokens=4)
    assert len(again.tokens) == 4


def test_the_most_likely_tokens_are_told_beside_the_sampled_ones(driver: Driver) -> None:
    plain, answer = batch(driver), batch(driver, top=3)
    for index, prompt in enumerate(PROMPTS[:1]):
        assert answer[index].tokens == plain[index].tokens
        np.testing.assert_allclose(answer[index].logprobs, plain[index].logprobs, atol=1e-4)
        assert plain[index].top == []
        assert len(answer[index].top) == len(answer[index].tokens)
        ranked = sorted(
            (reference_logprobs(driver.directory, prompt, [token], 0.7)[0], token)
            for token in range(256)
        )[::-1]
        assert [token for token, _ in answer[index].top[0]] == [token for _, token in ranked[:3]]
        told, expected = [each[1] for each in answer[index].top[0]], [each[0] for each in ranked]
        np.testing.assert_allclose(told, expected[:3], atol=2e-4)


def test_only_given_tokens_stop(driver: Driver) -> None:
    """The model's own end-of-sequence token (2) is a token like any other unless it is given."""
    answers = [
        driver.answer(PROMPTS[0], max_tokens=200, seed=seed, temperature=2.0) for seed in range(6)
    ]
    assert any(2 in answer.tokens[:-1] for answer in answers)
    assert {len(answer.tokens) for answer in answers} == {200}


def test_budgets_and_the_context(driver: Driver) -> None:
    assert driver.engine.max_model_len == POSITIONS
    prompt = prompt_of(1, POSITIONS - 6)
    assert driver.answer(prompt, max_tokens=4).finish_reason == "length"
    assert driver.answer(prompt, max_tokens=6).finish_reason == "length"
    for budget in (7, None):
        answer = driver.answer(prompt, max_tokens=budget)
        assert len(answer.tokens) == 6
        assert answer.finish_reason == "model_context"
        expected = reference_logprobs(driver.directory, prompt, answer.tokens, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
    full = driver.answer(prompt_of(1, POSITIONS), max_tokens=5)
    assert full.tokens == full.logprobs == []
    assert full.finish_reason == "model_context"


def test_bad_requests_are_refused(driver: Driver) -> None:
    for bad in (
        [request(1, [])],
        [request(1, [5]), request(1, [6])],
        [request(1, [5], temperature=-1.0)],
        [request(1, [5], temperature=2.5)],
        [request(1, [5], max_tokens=0)],
        [request(1, [5, VOCABULARY])],
        [request(1, [-1])],
        [request(1, [5], seed=2**63)],
    ):
        with pytest.raises(ValueError, match="sequence 1"):
            driver.generate(bad)
    assert len(driver.answer(PROMPTS[0]).tokens) == 12


def test_turns_reuse_keys_and_values_and_change_nothing(driver: Driver) -> None:
    before = driver.engine.statistics()
    contexts = [list(prompt) for prompt in PROMPTS]
    for turn in range(4):
        requests = [
            request(index, context, max_tokens=3 + turn, seed=100 * turn + index)
            for index, context in enumerate(contexts)
        ]
        answers = driver.generate(requests)
        for index, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
            expected = reference_logprobs(driver.directory, context, answer.tokens, 0.7)
            np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
            context += answer.tokens + prompt_of(turn * 31 + index, 4 + index)
        if turn == 1:  # some episodes end, one starts anew with other tokens under an old id
            driver.engine.finish([1, 4])
            contexts[1] = prompt_of(77, 11)
            contexts[6] = contexts[6][:10] + prompt_of(78, 5)
    driver.engine.finish(range(len(PROMPTS)))
    after = driver.engine.statistics()
    hits = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert 0 < hits < after["prompt_tokens"] - before["prompt_tokens"]
    assert after["requests"] - before["requests"] == 32


def test_calls_may_overlap(driver: Driver) -> None:
    async def one(index: int) -> Completion:
        return (await driver.engine.generate([request(index, PROMPTS[index])]))[0]

    async def overlap() -> list[Completion]:
        return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))

    overlapped = driver.run(overlap())
    driver.engine.finish(range(len(PROMPTS)))
    assert [a.tokens for a in overlapped] == [a.tokens for a in batch(driver)]


def test_the_limit_on_running_answers_changes_while_the_engine_lives(driver: Driver) -> None:
    """It changes how many answers are sampled side by side, and none of them."""
    telling, most = set[int](), 0

    async def one(index: int) -> Completion:
        def tell(tokens: Sequence[int]) -> None:
            nonlocal most
            telling.add(index)
            most = max(most, len(telling))

        asked = request(index, PROMPTS[index], max_tokens=8, on_tokens=tell)
        (answer,) = await driver.engine.generate([asked])
        telling.discard(index)
        return answer

    async def all_of_them() -> list[Completion]:
        nonlocal most
        most = 0
        return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))

    free = driver.run(all_of_them())
    for limit in (3, 1000):
        driver.engine.limit_running(limit)
        answers = driver.run(all_of_them())
        assert [a.tokens for a in answers] == [a.tokens for a in free]
        if not driver.engine.lockstep and limit == 3:
            assert most == limit
    together = [request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    plain = driver.generate(together)
    driver.engine.limit_running(2)
    assert [a.tokens for a in driver.generate(together)] == [a.tokens for a in plain]
    driver.engine.limit_running(256)
    driver.engine.finish(range(len(PROMPTS)))


def test_of_answers_that_wait_those_of_the_lowest_priority_begin_first(driver: Driver) -> None:
    if driver.engine.lockstep:
        pytest.skip("its answers do not wait: they come in batches")
    begun: list[int] = []

    async def one(index: int) -> None:
        def tell(tokens: Sequence[int]) -> None:
            if index not in begun:
                begun.append(index)

        asked = request(index, PROMPTS[index], max_tokens=8, priority=-index, on_tokens=tell)
        await driver.engine.generate([asked])

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, range(len(PROMPTS))))

    driver.engine.limit_running(1)
    driver.run(all_of_them())
    assert begun == [0, *range(len(PROMPTS) - 1, 0, -1)]
    driver.engine.limit_running(256)
    driver.engine.finish(range(len(PROMPTS)))


def test_an_answer_that_waits_for_its_place_can_be_cancelled(driver: Driver) -> None:
    if driver.engine.lockstep:
        pytest.skip("its answers do not wait: they come in batches")

    async def cancelled() -> tuple[Completion, Completion]:
        asked = [request(index, PROMPTS[index], max_tokens=200) for index in range(3)]
        first, second, third = (
            asyncio.create_task(driver.engine.generate([each])) for each in asked
        )
        await asyncio.sleep(0.02)
        await driver.engine.cancel([1])
        (waiting,) = await second
        assert not first.done()
        third.cancel()
        return (await first)[0], waiting

    driver.engine.limit_running(1)
    first, waiting = driver.run(cancelled())
    driver.engine.limit_running(256)
    assert (waiting.tokens, waiting.finish_reason) == ([], "cancelled")
    assert (len(first.tokens), first.finish_reason) == (200, "length")
    driver.engine.finish(range(3))
    assert driver.answer(PROMPTS[2]).finish_reason == "length"


def test_cancel_ends_running_answers_only(driver: Driver) -> None:
    async def cancelled() -> list[Completion]:
        running = await driver.amid(3, 200)
        await driver.engine.cancel([0, 2, 99])
        return await running

    first, second, third = driver.run(cancelled())
    driver.engine.finish(range(3))
    assert first.finish_reason == third.finish_reason == "cancelled"
    assert len(first.tokens) == len(first.logprobs) < 200
    assert second.finish_reason == "length"
    assert len(second.tokens) == 200
    if first.tokens:
        expected = reference_logprobs(driver.directory, PROMPTS[0], first.tokens, 0.7)
        np.testing.assert_allclose(first.logprobs, expected, atol=2e-4)
    driver.run(driver.engine.cancel([0]))
    assert driver.answer(PROMPTS[0]).finish_reason == "length"


def test_tokens_are_told_as_they_are_sampled(driver: Driver) -> None:
    pieces: list[Sequence[int]] = []
    answer = driver.answer(PROMPTS[1], max_tokens=40, on_tokens=pieces.append)
    told = [token for piece in pieces for token in piece]
    assert answer.tokens == driver.answer(PROMPTS[1], max_tokens=40).tokens
    assert told == answer.tokens[: len(told)]
    # An engine that answers whole batches tells nothing before.
    assert bool(told) is not driver.engine.lockstep


def test_a_cancelled_caller_leaves_the_engine_usable(driver: Driver) -> None:
    async def abandon() -> None:
        task = await driver.amid(1, 150)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    driver.run(abandon())
    assert driver.answer(PROMPTS[0]).finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_an_answer_of_a_form_has_the_log_probs_of_the_masked_distribution(
    driver: Driver, temperature: float
) -> None:
    """Beside free ones. The trainer, whose weights are the engine's, has the same; with the masks
    left out it has others."""
    forms = [CHOICE if number % 2 else None for number in range(len(PROMPTS))]
    requests = [
        request(n, prompt, form=form, max_tokens=20, temperature=temperature, stop_token_ids=STOPS)
        for n, (prompt, form) in enumerate(zip(PROMPTS, forms, strict=True))
    ]
    answers = driver.generate(requests)
    driver.engine.finish(range(len(PROMPTS)))
    formed = [n for n, form in enumerate(forms) if form]
    for n in formed:
        assert said(answers[n]) in TEXTS
        assert answers[n].finish_reason == "stop"
        expected = masked_logprobs(driver.directory, PROMPTS[n], answers[n].tokens, temperature)
        np.testing.assert_allclose(answers[n].logprobs, expected, atol=1e-4)
        # The rest of a text that is decided.
        assert 0.0 in answers[n].logprobs
    assert len({said(answers[n]) for n in formed}) > 1
    asked = list(zip(PROMPTS, answers, forms, strict=True))
    found = trainer_logprobs(driver.directory, asked, temperature or 1.0)
    for answer, logprobs in zip(answers, found, strict=True):
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-4)
    unmasked = [(prompt, answer, None) for prompt, answer, _ in asked]
    others = trainer_logprobs(driver.directory, unmasked, temperature or 1.0)
    assert all(np.abs(others[n] - found[n]).max() > 0.5 for n in formed)


def test_an_answer_of_a_form_is_cut_by_its_budget_as_others_are(
    driver: Driver,
) -> None:
    options = {"form": CHOICE, "stop_token_ids": STOPS}
    cut = driver.answer(PROMPTS[0], max_tokens=1, **options)
    assert (cut.finish_reason, len(cut.tokens)) == ("length", 1)
    assert driver.answer(PROMPTS[0], **options).tokens[:1] == cut.tokens
    with pytest.raises(ValueError, match="a form with other stop tokens than its own"):
        driver.answer(PROMPTS[0], form=CHOICE)


def test_a_dead_end_of_a_form_ends_that_answer_alone(driver: Driver) -> None:
    forms = [DEAD_END, CHOICE, None]
    dead, formed, free = driver.generate(
        [
            request(n, PROMPTS[n], form=form, max_tokens=20, stop_token_ids=STOPS)
            for n, form in enumerate(forms)
        ]
    )
    driver.engine.finish(range(len(forms)))
    assert dead.finish_reason == "dead_end"
    assert said(formed) in TEXTS
    alone = driver.answer(PROMPTS[2], seed=1002, max_tokens=20, stop_token_ids=STOPS)
    assert alone.tokens == free.tokens


def test_an_answer_of_a_form_that_has_not_begun_is_asked_for_again(driver: Driver) -> None:
    """With the others, when what held them is over."""
    if driver.engine.lockstep:
        pytest.skip("its answers stop and go on in slices")
    engine = InterruptibleEngine(driver.engine)
    asked = [
        request(n, PROMPTS[n], form=CHOICE, max_tokens=20, stop_token_ids=STOPS) for n in range(3)
    ]

    async def held() -> list[Completion]:
        answers = [asyncio.create_task(engine.generate([each])) for each in asked]
        await asyncio.sleep(0)
        await engine.hold()
        assert not answers[2].done()
        engine.go_on()
        return [(await each)[0] for each in answers]

    free = driver.generate(asked)
    driver.engine.limit_running(1)
    answers = driver.run(asyncio.wait_for(held(), 200))
    driver.engine.limit_running(256)
    driver.engine.finish(range(3))
    assert [each.tokens for each in answers] == [each.tokens for each in free]

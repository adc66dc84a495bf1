"""Answers of vLLM that stop between two tokens: as transformers has them, under the weights of each
part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.rollout.engines.vllm_answers import sampling_parameters
from earl_core.trajectory.samples import VersionSpan
from earl_core.weights.publish import publish
from tests.engines.driver import Driver, request
from tests.engines.models import make, model_logprobs, prompt_of
from tests.engines.starting import start
from tests.engines.switching import assert_switches

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 10, 240
"""Nearly as many tokens as the model has positions: nobody is done before he is asked to stop."""
END = 7


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    directory = tmp_path_factory.mktemp("interruptible")
    make("llama_untied", directory)
    driver = start("vllm", directory, tmp_path_factory.mktemp("rpc"))
    yield driver
    driver.close()


def asked(number: int) -> GenerationRequest:
    return request(number, prompt_of(number, 5 + number), max_tokens=TOKENS - number)


def ended_by(tokens: list[int], known: int) -> int | None:
    places = [at for at, token in enumerate(tokens, 1) if at > known and token == END]
    return places[0] if places else None


def test_answers_go_on_under_new_weights_after_the_memory_was_away(
    driver: Driver, tmp_path: Path
) -> None:
    """Twice: there and back. Whatever was asked meanwhile has the weights of its time."""
    models = make("llama_untied", tmp_path / "old"), make("llama_untied", tmp_path / "new", seed=1)
    versions = [
        publish(model.state_dict(), tmp_path / f"weights{n}", n, torch.float32)
        for n, model in ((1, models[1]), (2, models[0]))
    ]
    between: list[Completion] = []

    async def work() -> list[Completion]:
        engine, told = InterruptibleEngine(driver.engine), 0

        def grown(tokens: object) -> None:
            nonlocal told
            told += 1

        requests = [asked(number) for number in range(REQUESTS)]
        requests[0] = request(0, prompt_of(0, 5), max_tokens=TOKENS, on_tokens=grown)
        requests[1] = request(1, prompt_of(1, 6), max_tokens=TOKENS, ends=ended_by, top=2)
        answers = [asyncio.create_task(engine.generate([each])) for each in requests]
        for stop, manifest in zip((15, 60), versions, strict=True):
            while told < stop:
                await asyncio.sleep(0.002)
            await engine.hold()
            before = driver.engine.statistics()["generated_tokens"]
            await driver.engine.release_memory()
            assert driver.engine.policy_version is None
            await driver.engine.restore_memory()
            await driver.engine.play_under(manifest)
            (aside,) = await driver.engine.generate([request(99, prompt_of(0, 5))])
            between.append(aside)
            after = driver.engine.statistics()["generated_tokens"]
            assert after - before == len(aside.tokens)
            assert not answers[0].done()
            engine.go_on()
        return [(await answer)[0] for answer in answers]

    answers = driver.run(work())
    switched = 0
    for n, answer in enumerate(answers):
        prompt, spans = prompt_of(n, 5 + n), [tuple(span) for span in answer.spans]
        assert [first for _, first, _ in spans] == [0, *(end for *_, end in spans)][: len(spans)]
        assert spans[-1][2] == len(answer.tokens)
        assert [version for version, *_ in spans] == [0, 1, 2][: len(spans)]
        switched += len(spans) == 3
        by = [model_logprobs(model, prompt, answer.tokens, 0.7) for model in models]
        expected = [by[version % 2][at] for version, *span in spans for at in range(*span)]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        assert np.abs(np.subtract(*by)).max() > 0.1
        wanted = {0: TOKENS, 1: len(answer.tokens)}.get(n, TOKENS - n)
        assert len(answer.tokens) == wanted
    assert switched >= REQUESTS // 2
    assert END not in answers[1].tokens[:-1]
    assert [len(each) for each in answers[1].top] == [2] * len(answers[1].tokens)
    for model, aside in zip(reversed(models), between, strict=True):
        expected = model_logprobs(model, prompt_of(0, 5), aside.tokens, 0.7)
        np.testing.assert_allclose(aside.logprobs, expected, atol=1e-4)


def test_weights_change_between_any_two_tokens(driver: Driver, tmp_path: Path) -> None:
    # The test before leaves the weights of the beginning, as a later version.
    assert_switches(driver, tmp_path, driver.engine.policy_version or 0)


def test_each_part_of_an_answer_has_draws_of_its_own() -> None:
    """vLLM's generators begin with their seeds."""
    begun = Completion([], [], "cancelled", [VersionSpan(0, 0, 0)])
    seeds = []
    for count in range(5):
        begun = replace(begun, tokens=[5] * count, logprobs=[-1.0] * count)
        seeds.append(sampling_parameters(replace(asked(0), begun=begun), 9).seed)
    assert len(set(seeds)) == 5
    assert seeds[0] == asked(0).seed


def test_an_answer_that_is_stopped_can_be_cancelled(driver: Driver) -> None:
    async def work() -> Completion:
        engine, begun = InterruptibleEngine(driver.engine), asyncio.Event()
        heard = replace(asked(0), on_tokens=lambda _: begun.set())
        answer = asyncio.create_task(engine.generate([heard]))
        await begun.wait()
        await engine.hold()
        assert not answer.done()
        await engine.cancel([0, 5])
        return (await answer)[0]

    answer = driver.run(work())
    assert answer.finish_reason == "cancelled"
    assert len(answer.tokens) == len(answer.logprobs) < TOKENS

"""A lockstep engine in slices: the answers of the engine, and weights that change in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from earl_core.rollout.chat.call_grammars import pattern
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.in_slices import SLICE_TOKENS, EngineInSlices
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.trajectory.forms import Form
from tests.engines.driver import Driver, request
from tests.engines.forms import STOPS, TOKENIZER
from tests.engines.models import make, prompt_of
from tests.engines.switching import assert_switches

REQUESTS, TOKENS = 10, 40


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    directory = tmp_path_factory.mktemp("slices")
    make("llama_untied", directory)
    TOKENIZER.save_pretrained(directory)
    driver = Driver(TorchEngine(directory, threads=1), directory)
    driver.run(driver.engine.start())
    yield driver
    driver.close()


LETTERS = Form(json.dumps({"type": "structural_tag", "format": pattern("[a-f]{20}")}), STOPS)


def asked(number: int) -> GenerationRequest:
    """Every third one of a form."""
    form = {"form": LETTERS, "stop_token_ids": STOPS} if number % 3 == 0 else {}
    return request(number, prompt_of(number, 5 + number), max_tokens=TOKENS - number, **form)


def test_slices_give_the_answers_of_the_engine(driver: Driver) -> None:
    async def in_slices() -> list[Completion]:
        engine = EngineInSlices(driver.engine, lambda: 0)
        answers = (engine.generate([asked(number)]) for number in range(REQUESTS))
        found = [each for (each,) in await asyncio.gather(*answers)]
        await engine.stop()
        return found

    whole = driver.generate([asked(number) for number in range(REQUESTS)])
    driver.engine.finish(range(REQUESTS))
    parts = driver.run(in_slices())
    driver.engine.finish(range(REQUESTS))
    for one, other in zip(whole, parts, strict=True):
        assert one.tokens == other.tokens
        assert one.spans == other.spans
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert [each.finish_reason for each in parts] == ["stop", "length", "length"] * 3 + ["stop"]
    assert all(len(each.tokens) == 21 for each in parts[::3])


def test_a_held_engine_begins_no_slice_and_goes_on_where_it_stood(driver: Driver) -> None:
    assert SLICE_TOKENS < TOKENS // 2

    async def work() -> Completion:
        engine = EngineInSlices(driver.engine, lambda: 1)
        answer = asyncio.create_task(engine.generate([asked(1)]))
        await engine.advance(2)
        await engine.hold()
        engine_tokens = driver.engine.statistics()["generated_tokens"]
        await asyncio.sleep(0.05)
        assert driver.engine.statistics()["generated_tokens"] == engine_tokens
        assert not answer.done()
        engine.go_on()
        (found,) = await answer
        await engine.stop()
        return found

    whole = driver.generate([asked(1)])[0]
    driver.engine.finish([1])
    assert driver.run(work()).tokens == whole.tokens


def test_weights_change_between_any_two_tokens(driver: Driver, tmp_path: Path) -> None:
    assert_switches(driver, tmp_path)

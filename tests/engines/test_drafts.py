"""Drafts from past answers: the torch engine's tokens are those without them, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.config.rollout import DraftsConfig
from earl_core.rollout.engines.drafting import PassTimes
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.weights.publish import publish
from tests.engines.driver import PROMPTS, Driver, request
from tests.engines.models import make, read, reference_logprobs

Start = Callable[..., Driver]

EQUAL = 5e-5
"""Log-probs of passes of different widths, in float32. A token differs where a draw lies so near to
the edge between two of them; the draws of these tests do not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafted")
    make("llama_tied", directory)
    return directory


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Starts engines on the model."""
    started = []

    def one(drafts: DraftsConfig | None = None, **options: Any) -> Driver:
        driver = Driver(TorchEngine(model, drafts=drafts, threads=1, **options), model)
        driver.run(driver.engine.start())
        started.append(driver)
        return driver

    yield one
    for driver in started:
        driver.close()


@pytest.fixture
def wide_passes_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that computes little faster than it reads its memory: whatever is likely is
    drafted, whatever the clock says."""
    monkeypatch.setattr(PassTimes, "known", lambda *_: True)
    monkeypatch.setattr(PassTimes, "expected", lambda *_: 1.0)


def _play(driver: Driver, iterations: Sequence[Sequence[GenerationRequest]]) -> list[Completion]:
    """All answers of iterations, whose sequences are forgotten after each."""
    played: list[Completion] = []
    for requests in iterations:
        played += driver.generate(requests)
        driver.engine.finish([each.sequence_id for each in requests])
    return played


def _check_equal(ours: Sequence[Completion], plain: Sequence[Completion]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert one.tokens == other.tokens
        assert (one.finish_reason, one.spans) == (other.finish_reason, other.spans)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=EQUAL)


def _accepted(answers: Sequence[Completion]) -> int:
    return sum(answer.drafts.accepted for answer in answers)


def _groups(first: int, temperature: float, **options: Any) -> list[GenerationRequest]:
    """Four prompts, each asked for four times; two of a group have the same seed."""
    return [
        request(
            first + 4 * number + member,
            prompt,
            temperature=temperature,
            seed=100 * number + member % 3,
            max_tokens=12 + 9 * member,
            **options,
        )
        for number, prompt in enumerate(PROMPTS[:4])
        for member in range(4)
    ]


def _ends(tokens: Sequence[int], known: int) -> int | None:
    """A string that ends an answer: two tokens, each of a third of all."""
    for at in range(max(1, known), len(tokens)):
        if tokens[at] % 3 == 0 and tokens[at - 1] % 3 == 0 and at > 5:
            return at + 1
    return None


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("running", [256, 3])
def test_the_tokens_are_those_without_drafts(
    temperature: float, running: int, start: Start, wide_passes_cost_nothing: None
) -> None:
    iterations = [
        _groups(100 * number, temperature, ends=_ends, stop_token_ids=(7, 50), top=number % 3)
        for number in range(3)
    ]
    plain = _play(start(max_running_requests=running), iterations)
    ours = _play(start(DraftsConfig(), max_running_requests=running), iterations)
    _check_equal(ours, plain)
    for one, other in zip(ours, plain, strict=True):
        assert len(one.top) == len(other.top)
        for mine, theirs in zip(one.top, other.top, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=EQUAL, rtol=EQUAL)
    assert {answer.finish_reason for answer in ours} == {"stop", "length"}
    # The second and the third iteration have the seeds of the first.
    later = ours[16:]
    tokens = sum(len(answer.tokens) for answer in later)
    passes = sum(answer.drafts.passes for answer in later)
    assert _accepted(later) > 0.5 * tokens
    assert passes < 0.5 * tokens
    # Some ended within a draft.
    assert any(a.drafts.passes + a.drafts.accepted > len(a.tokens) for a in later)
    assert all(answer.drafts == (0, 0, 0) for answer in plain)


def test_log_probs_are_those_of_a_plain_forward_pass(
    model: Path, start: Start, wide_passes_cost_nothing: None
) -> None:
    iterations = [_groups(0, 1.0), _groups(100, 1.0)]
    answers = _play(start(DraftsConfig(most_tokens=32)), iterations)
    assert _accepted(answers) > 100
    for asked, answer in zip(iterations[1], answers[16:], strict=True):
        expected = reference_logprobs(model, asked.tokens, answer.tokens, 1.0)
        np.testing.assert_allclose(answer.logprobs, expected, atol=EQUAL)


def test_turns_parts_and_cancelled_answers_go_on_as_without_drafts(
    start: Start, wide_passes_cost_nothing: None
) -> None:
    def played(driver: Driver) -> list[Completion]:
        found: list[Completion] = []
        for iteration in range(2):
            contexts = {4 * iteration + n: list(PROMPTS[n % 2]) for n in range(4)}
            for turn in range(3):
                asked = [
                    request(number, context, seed=turn + number % 4 // 2, max_tokens=8 * (turn + 1))
                    for number, context in contexts.items()
                ]
                for end in (3, 7, 8 * (turn + 1)):
                    part = [replace(each, max_tokens=end) for each in asked]
                    answers = driver.generate(part)
                    asked = [e.after(a) for e, a in zip(asked, answers, strict=True)]
                found += answers
                for (number, context), answer in zip(contexts.items(), answers, strict=True):
                    context += [*answer.tokens, 3 + number % 2, 5]
            driver.engine.finish(list(contexts))
        return found

    ours = played(start(DraftsConfig()))
    _check_equal(ours, played(start()))
    assert _accepted(ours[12:]) > 0.4 * sum(len(each.tokens) for each in ours[12:])


def test_drafts_of_other_weights_are_right_where_the_weights_agree(
    model: Path, start: Start, tmp_path: Path, wide_passes_cost_nothing: None
) -> None:
    state = read(model).state_dict()
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: tensor + 0.002 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }
    changed["lm_head.weight"] = changed["model.embed_tokens.weight"]
    versions = [publish(changed, tmp_path, 1, "float32"), publish(state, tmp_path, 2, "float32")]
    found = []
    for drafts in (None, DraftsConfig()):
        driver = start(drafts)
        answers = _play(driver, [_groups(0, 1.0)])
        for manifest in versions:
            driver.run(driver.engine.play_under(manifest))
            answers += _play(driver, [_groups(100 * manifest.policy_version, 1.0)])
        found.append(answers)
    plain, ours = found
    _check_equal(ours, plain)
    assert [a.tokens for a in plain[:16]] != [a.tokens for a in plain[16:32]]
    assert [a.tokens for a in plain[:16]] == [a.tokens for a in plain[32:]]
    assert _accepted(ours[16:32]) > 50
    assert _accepted(ours[32:]) > _accepted(ours[16:32])


def test_a_request_may_have_no_drafts_and_become_none(
    start: Start, wide_passes_cost_nothing: None
) -> None:
    driver = start(DraftsConfig())
    first = [replace(each, drafted=False) for each in _groups(0, 1.0)]
    again = [replace(each, drafted=False) for each in _groups(100, 1.0)]
    answers = _play(driver, [first, again, _groups(200, 1.0)])
    assert all(answer.drafts == (0, 0, 0) for answer in answers[:32])
    fresh = _play(start(DraftsConfig()), [_groups(200, 1.0)])
    assert [a.drafts for a in answers[32:]] == [a.drafts for a in fresh]


@pytest.mark.parametrize("added", [2.0, 0.0])
def test_there_are_drafts_where_they_were_measured_to_pay(
    added: float, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """added: to the seconds of a pass, by each draft token of a sequence."""
    note = PassTimes.note

    def told(times: PassTimes, sequences: int, width: int, seconds: float) -> None:
        note(times, sequences, width, 1.0 + added * (width - 1))

    monkeypatch.setattr(PassTimes, "note", told)
    answers = _play(start(DraftsConfig()), [_groups(100 * number, 0.7) for number in range(4)])
    tokens = sum(len(answer.tokens) for answer in answers[48:])
    assert sum(answer.drafts.accepted for answer in answers[16:]) > 0
    if added:
        assert _accepted(answers[48:]) < 0.05 * tokens
    else:
        assert _accepted(answers[48:]) > 0.5 * tokens

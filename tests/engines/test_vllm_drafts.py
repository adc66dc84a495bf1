"""Drafts from past answers on vLLM: its tokens are those without them, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from earl_core.config.rollout import DraftsConfig
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from tests.engines.driver import PROMPTS, Driver, request
from tests.engines.forms import CHOICE, STOPS, TEXTS, said
from tests.engines.models import make, read, reference_logprobs
from tests.engines.starting import start
from tests.rollout.chat_models import CHATML, char_tokenizer

pytest.importorskip("vllm")
# How often drafts pay is up to the clock.
pytestmark = pytest.mark.campaign

EQUAL = 1e-4
ANSWERS = 1600


def _ends(tokens: Sequence[int], known: int) -> int | None:
    """A string that ends an answer: two tokens, each of a third of all."""
    for at in range(max(1, known), len(tokens)):
        if tokens[at] % 3 == 0 and tokens[at - 1] % 3 == 0 and at > 5:
            return at + 1
    return None


def _groups(first: int, temperature: float, **options: object) -> list[GenerationRequest]:
    """Four prompts, each asked for three times; the second of a group has the seed of the first."""
    return [
        request(
            first + 3 * number + member,
            prompt,
            temperature=temperature,
            seed=100 * number + member // 2,
            max_tokens=16 + 9 * member,
            stop_token_ids=(7, 50),
            **options,
        )
        for number, prompt in enumerate(PROMPTS[:4])
        for member in range(3)
    ]


def _play(driver: Driver, requests: Sequence[GenerationRequest]) -> list[Completion]:
    answers = driver.generate(requests)
    driver.engine.finish([each.sequence_id for each in requests])
    return answers


def _played(driver: Driver) -> list[tuple[GenerationRequest, Completion]]:
    """All kinds of answers, each iteration with the seeds of the one before it."""
    found: list[tuple[GenerationRequest, Completion]] = []
    for number in range(3):
        for kind, temperature in enumerate((0.0, 0.7, 1.0)):
            asked = _groups(1000 * number + 100 * kind, temperature, top=number)
            found += zip(asked, _play(driver, asked), strict=True)
        # Two turns beside an answer of a form and one without drafts; the second goes on in parts.
        form = request(
            1000 * number + 900, PROMPTS[4], max_tokens=40, form=CHOICE, stop_token_ids=STOPS
        )
        bare = request(1000 * number + 901, PROMPTS[4], max_tokens=40, drafted=False)
        asked = [request(1000 * number + 300 + n, PROMPTS[n], seed=n, ends=_ends) for n in range(4)]
        answers = driver.generate([*asked, form, bare])
        assert said(answers[4]) in TEXTS
        assert answers[4].drafts == answers[5].drafts == (0, 0, 0)
        found += zip([*asked, bare], [*answers[:4], answers[5]], strict=True)
        later = [
            replace(each, tokens=[*each.tokens, *answer.tokens, 5], max_tokens=6, ends=None)
            for each, answer in zip(asked, answers[:4], strict=True)
        ]
        parts = [e.after(a) for e, a in zip(later, driver.generate(later), strict=True)]
        parts = [replace(each, max_tokens=24) for each in parts]
        found += zip(parts, _play(driver, parts), strict=True)
    return found


def _second_tokens(directory: Path, prompt: Sequence[int], temperature: float) -> np.ndarray:
    """How likely each is to be an answer's second token, by transformers."""
    model = read(directory)
    with torch.inference_mode():
        first = model(torch.tensor([list(prompt)])).logits[0, -1].double()
        every = torch.tensor([[*prompt, token] for token in range(len(first))])
        second = model(every).logits[:, -1].double()
    chances = torch.softmax(first / temperature, -1) @ torch.softmax(second / temperature, -1)
    return chances.numpy()


def test_tokens_and_log_probs_are_those_without_drafts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And the distribution is the model's. A pass of the model takes so much less than all else
    that drafts pay whatever the clock says."""
    make("llama_tied", tmp_path)
    char_tokenizer(CHATML).save_pretrained(tmp_path)
    scratch = tmp_path_factory.mktemp("rpc")
    found: list[list[tuple[GenerationRequest, Completion]]] = []
    answers: list[Completion] = []
    for drafts in (None, DraftsConfig(memory_bytes=1 << 18)):
        driver = start("vllm", tmp_path, scratch, masked=True, threads=1, drafts=drafts)
        try:
            found.append(_played(driver))
            if drafts is not None:
                many = [
                    request(n, PROMPTS[3], temperature=0.25, seed=n, max_tokens=4)
                    for n in range(ANSWERS)
                ]
                answers = [
                    a for at in range(0, ANSWERS, 16) for a in _play(driver, many[at : at + 16])
                ]
        finally:
            driver.close()
    plain, ours = found
    for (asked, one), (_, other) in zip(ours, plain, strict=True):
        assert (one.tokens, one.finish_reason, one.spans) == (
            other.tokens,
            other.finish_reason,
            other.spans,
        )
        expected = reference_logprobs(tmp_path, asked.tokens, one.tokens, asked.temperature or 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=EQUAL)
        assert [[t for t, _ in each] for each in one.top] == [
            [t for t, _ in each] for each in other.top
        ]
    later = [a for asked, a in ours[len(ours) // 3 :] if asked.drafted and asked.ends is None]
    accepted = sum(answer.drafts.accepted for answer in later)
    assert accepted > 0.2 * sum(len(answer.tokens) for answer in later)
    for answer in later:
        assert answer.drafts.passes + answer.drafts.accepted == len(answer.tokens)
    assert {answer.finish_reason for answer in later} == {"stop", "length"}
    assert all(answer.drafts.accepted == 0 for _, answer in plain)

    assert sum(answer.drafts.accepted for answer in answers) > 100
    chances = _second_tokens(tmp_path, PROMPTS[3], 0.25)
    often = chances * ANSWERS >= 8
    counted = Counter(answer.tokens[1] for answer in answers)
    seen = np.array([counted[token] for token in range(len(chances))])
    sides = [np.append(each[often], each[~often].sum()) for each in (seen, chances * ANSWERS)]
    assert often.sum() > 5
    assert chisquare(*sides).pvalue > 1e-3

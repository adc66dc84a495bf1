"""Answers under two policies, by either engine: each switches at a token of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from earl_core.weights.publish import publish
from tests.engines.driver import Driver, request
from tests.engines.models import make, model_logprobs, prompt_of

_ANSWERS, _TOKENS, _LAST = 50, 40, 30


def assert_switches(driver: Driver, scratch: Path, version: int = 0) -> None:
    """Tokens have the log-probs of transformers, of the old model before and of the new one after.

    driver: its engine holds `llama_untied` of seed 0 as this version, and the next one then.
    """
    models = [make("llama_untied", scratch / str(seed), seed=seed) for seed in (0, 1)]
    changed = publish(models[1].state_dict(), scratch / "weights", version + 1, torch.float32)
    prompts = [prompt_of(n, 5 + n % 10) for n in range(_ANSWERS)]
    ends = np.random.default_rng(0).integers(1, _LAST, _ANSWERS).tolist()
    begun = driver.generate([request(n, prompts[n], max_tokens=end) for n, end in enumerate(ends)])
    driver.run(driver.engine.play_under(changed))
    again = [request(n, prompts[n], max_tokens=_TOKENS, begun=each) for n, each in enumerate(begun)]
    answers = driver.generate(again)
    for n, (end, answer) in enumerate(zip(ends, answers, strict=True)):
        spans = [(version, 0, end), (version + 1, end, _TOKENS)]
        assert [tuple(span) for span in answer.spans] == spans
        assert answer.tokens[:end] == begun[n].tokens
        before, after = (model_logprobs(m, prompts[n], answer.tokens, 0.7) for m in models)
        expected = [*before[:end], *after[end:]]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        assert np.abs(np.array(before) - after).max() > 0.1

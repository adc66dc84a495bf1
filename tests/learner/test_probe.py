"""The probe of a publication: where it asks, and what the learner says there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.learner.data.prefixes import candidates, chosen
from earl_core.weights.probe import Prefixes
from tests.learner.helpers import eager_model, random_samples, save_model
from tests.learner.test_policy_learner import make_learner


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_likeliest_tokens_are_those_of_whole_logits_at_temperature_1(
    kind: str, tmp_path: Path
) -> None:
    learner = make_learner(save_model(kind, tmp_path))
    drawn = chosen([candidates(random_samples(30, longest=90), 3)])
    rows = [Prefixes.model_validate(each) for each in drawn]
    plain = eager_model(tmp_path).double()
    assert sum(len(row.lengths) for row in rows) > 30
    for row, found in zip(rows, learner.probe(rows), strict=True):
        assert (found.tokens, found.lengths) == (row.tokens, row.lengths)
        logits = plain(input_ids=torch.tensor([row.tokens])).logits[0]
        logprobs, tokens = torch.log_softmax(logits, dim=-1).max(-1)
        ends = [length - 1 for length in row.lengths]
        assert list(found.likeliest) == tokens[ends].tolist()
        np.testing.assert_allclose(found.logprobs, logprobs[ends].detach(), atol=2e-5)
    assert learner.probe([]) == ()


def test_beginnings_are_bounded_and_do_not_depend_on_the_ranks() -> None:
    samples = random_samples(40, longest=600)
    together = chosen([candidates(samples, 1)])
    dealt = chosen([candidates(samples[rank::3], 1) for rank in range(3)])
    assert together == dealt != chosen([candidates(samples, 2)])
    assert 1 <= len(together) <= 8
    assert sum(len(row["tokens"]) for row in together) <= 1024
    for row in together:
        assert 0 < row["lengths"][0] < row["lengths"][-1] == len(row["tokens"]) <= 256
        assert len(row["lengths"]) <= 16
        (sample,) = (s for s in samples if s.tokens[: len(row["tokens"])].tolist() == row["tokens"])
        assert sample.loss_mask[row["lengths"]].all()

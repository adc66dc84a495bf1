"""Bounds and levels of the importance correction, against plain loops."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch

from earl_core.algorithms.importance import ImportanceCorrection, too_small, weight_metrics

TRAINER = [-1.0, -0.2, -3.0, -0.5, -2.0]
ENGINE = [-2.0, -0.1, -1.0, -0.5, -2.5]
EPISODES = [0, 0, 0, 1, 1]


def plain(level: str, low: float, cap: float, outside: str) -> list[float]:
    ratios = [math.exp(a - b) for a, b in zip(TRAINER, ENGINE, strict=True)]
    of = {e: [r for r, k in zip(ratios, EPISODES, strict=True) if k == e] for e in EPISODES}
    if level == "sequence":
        ratios = [math.prod(of[e]) for e in EPISODES]
    if level == "geometric":
        ratios = [math.prod(of[e]) ** (1 / len(of[e])) for e in EPISODES]
    if outside == "mask":
        return [r if low <= r <= cap else 0.0 for r in ratios]
    return [min(max(r, low), cap) for r in ratios]


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("outside", ["cut", "mask"])
def test_weights_equal_a_plain_loop(
    level: Literal["token", "geometric", "sequence"], outside: Literal["cut", "mask"]
) -> None:
    correction = ImportanceCorrection(level=level, outside=outside, low=0.5, cap=2.0)
    found = correction.weights(
        torch.tensor(TRAINER), torch.tensor(ENGINE), torch.tensor(EPISODES), 2
    )
    expected = plain(level, 0.5, 2.0, outside)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 1
    assert correction.token_wise == (level == "token")


def test_effective_sample_sizes_by_token_and_by_episode() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.5])
    found = weight_metrics(weights, np.array([1.0, 0.5]))
    assert found == {
        "importance_weight_mean": pytest.approx(3.5 / 4),
        "importance_masked_share": pytest.approx(1 / 4),
        "importance_sample_share": pytest.approx(3.5**2 / (5.25 * 4)),
        "importance_episode_share": pytest.approx(1.5**2 / (1.25 * 2)),
    }
    assert too_small(found, 0.58) == ""
    assert "size of 58.3% of the tokens and 90.0% of the episodes" in too_small(found, 0.6)
    assert weight_metrics(np.empty(0), np.empty(0)) == {}
    assert too_small({}, 0.9) == ""

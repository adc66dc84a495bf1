"""Rollouts with drafts from those before: the samples are those without."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earl_core.rollout.engines.drafting import PassTimes
from earl_core.rollout.rollout_stats import rollout_metrics
from earl_core.rollout.rollout_worker import RolloutWorker
from tests.rollout.chat_models import tiny_model
from tests.rollout.test_worker import Setting, tally_of

_COUNTED = {"draft_accepted_share", "tokens_per_pass"}


def test_the_samples_are_those_without_drafts_and_the_passes_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Games of several turns, and an evaluation that repeats itself."""
    # As on a device that computes little faster than it reads its memory.
    monkeypatch.setattr(PassTimes, "known", lambda *_: True)
    monkeypatch.setattr(PassTimes, "expected", lambda *_: 1.0)
    model = tiny_model(tmp_path / "model")

    async def played(worker: RolloutWorker) -> list[dict[str, Any]]:
        rollouts = [await worker.rollout(range(6), share=share) for share in range(2)]
        return [*rollouts, *[await worker.evaluate(8, 0.0) for _ in range(2)]]

    found = []
    for name, drafts in (("plain", None), ("drafted", {})):
        (tmp_path / name).mkdir()
        setting = Setting(tmp_path / name, model)
        setting.config["rollout"] |= {"max_tokens_per_turn": 12, "drafts": drafts}
        results = setting.run(played)
        tables = [setting.table(result).to_pylist() for result in results[:2]]
        found.append((tables, [rollout_metrics(tally_of(result)) for result in results]))
    (plain, without), (ours, with_drafts) = found
    for one, other in zip(chain(*ours), chain(*plain), strict=True):
        np.testing.assert_allclose(
            one.pop("rollout_logprobs"), other.pop("rollout_logprobs"), atol=1e-5
        )
        assert one == other
    assert not any(_COUNTED & metrics.keys() for metrics in without)
    for metrics in with_drafts:
        assert metrics.keys() >= _COUNTED
    # The second rollout has the draws of the first, and so has the evaluation.
    first, second, evaluated, again = (metrics["tokens_per_pass"] for metrics in with_drafts)
    assert 1 <= first < second > 2
    assert 1 <= evaluated < again > 2
    assert with_drafts[1]["draft_accepted_share"] > 0.5
    for one, other in zip(with_drafts, without, strict=True):
        assert one["generated_tokens"] == other["generated_tokens"]

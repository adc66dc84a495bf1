"""A mixture of experts through whole iterations: recorded, sealed, replayed."""

from __future__ import annotations

import json

import pytest

from tests.flows.runs import Runs
from tests.learner.test_routing import mixture


@pytest.mark.slow
def test_recorded_experts_are_trained_and_reward_and_advantage_read_none(runs: Runs) -> None:
    """Two minibatches, so that old log-probs are computed; a reference that routes by itself."""
    settings = [f"model={json.dumps({'path': str(mixture(runs.directory / 'mixture'))})}"]
    settings += ["update.max_mismatch=1e-4", "algorithm.importance_correction={cap: 2}"]
    # As the recipes' models, a random one learns something only if its games differ.
    (ended,) = runs.train_here({"overrides": settings})
    assert ended is None
    lines = runs.metrics()
    assert len(lines) == 2
    for line in lines:
        assert line["update/optimizer_steps"] > 0
        assert line["update/mismatch_max"] < 1e-5
        assert line["update/expert_load_max"] >= line["update/expert_load"] >= 1.0
        # Engine and trainer choose alike in float32, until the first of two steps moved the router.
        assert line["update/routing_changed_share"] < 0.2

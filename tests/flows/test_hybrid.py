"""A hybrid model through whole iterations: killed and resumed, it ends with the same bits."""

from __future__ import annotations

import pytest

from tests.flows.runs import KILLED, Runs

MODEL = (
    "model={path: PLACE, builder: 'earl_core.models.tiny:build', builder_options: "
    "{family: qwen3_5_moe_text, hidden: 64, heads: 2, warm_start_steps: 0}}"
)


@pytest.mark.slow
def test_a_killed_hybrid_ends_with_the_bits_of_one_that_was_not(runs: Runs) -> None:
    settings = [MODEL.replace("PLACE", str(runs.directory / "hybrid"))]
    runs.train(*settings)
    lines = runs.metrics()
    assert len(lines) == 2
    for line in lines:
        assert line["update/grad_norm"] > 1e-3
        assert line.get("update/mismatch_max", 0.0) < 1e-5
        assert "update/routing_changed_share" in line, "its experts were replayed"
    again = ["name=killed", *settings]
    for fault in ("rollout.after@1=kill", "update.seal@1=kill"):
        runs.train(*again, fault=fault, expect=KILLED)
        runs.wait_for_workers_to_end()
    runs.train(*again)
    for iteration in range(2):
        assert runs.weights(iteration, "killed") == runs.weights(iteration)
    assert runs.weights(0) != runs.weights(1)

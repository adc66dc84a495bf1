"""Iterations in which no group has two episodes left."""

from __future__ import annotations

import json

import pytest

from tests.flows.runs import LEARNING, Runs


@pytest.mark.slow
def test_an_iteration_without_a_step_is_counted_and_a_resume_goes_on(runs: Runs) -> None:
    """Four in a row, of which three are borne; the fifth learns."""
    options = {"count": 4 * 4, "folder": str(runs.directory)}
    environment = {"name": "tests.rollout.environments:Lonely", "options": options}
    settings = [
        *LEARNING,
        "iterations=5",
        "rollout.prompts_per_iteration=4",
        "rollout.group_size=2",
        "rollout.max_failed_share=0.6",
        f"environment={json.dumps(environment)}",
    ]
    first, second = runs.train_here({"overrides": settings}, {"overrides": settings})
    assert "iteration 3 is number 4 in a row without a step" in str(first)
    assert second is None
    lines = runs.metrics()
    assert [line["update/optimizer_steps"] > 0 for line in lines] == [False] * 4 + [True]
    assert [line["recovery/without_step"] for line in lines] == [1.0] * 4 + [0.0]
    assert [line["advantage/groups_dropped"] for line in lines] == [4.0] * 4 + [0.0]
    assert lines[-1]["update/grad_norm"] > 0
    # What was played counts, once: the resume met the sealed rollout and went past it.
    sealed = runs.executed("sealed")
    assert [sealed.count((k, "rollout")) for k in range(5)] == [1] * 5
    notes = [line for line in runs.ledger() if "ends without a step" in line["event"]]
    assert [line["iteration"] for line in notes] == [0, 1, 2, 3]

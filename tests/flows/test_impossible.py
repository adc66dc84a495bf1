"""Runs that cannot be."""

from __future__ import annotations

from tests.flows.runs import Runs


def test_sizes_that_cannot_work_stop_the_run_with_one_sentence(runs: Runs) -> None:
    output = runs.train("dispatch.max_bytes=100000", expect=1)
    assert "two versions of the model's weights must fit" in output
    assert runs.executed("sealed").count((0, "rollout")) == 0

"""Runs that cannot be."""

from __future__ import annotations

from tests.flows.runs import Runs


def test_sizes_that_cannot_work_stop_the_run_with_one_sentence(runs: Runs) -> None:
    output = runs.train("dispatch.max_bytes=1000000000000000", expect=1)
    assert "dispatch.max_bytes is 931,322.6 GiB, and two versions of the weights need" in output
    assert runs.executed("sealed").count((0, "rollout")) == 0

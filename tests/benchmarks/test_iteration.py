"""What `benchmarks.iteration` tells both of its sides, without running them."""

from __future__ import annotations

from benchmarks.iteration import Measured, trl_candidates
from benchmarks.iteration_sides import Iteration, Round, trl_settings
from earl_core.config import load_config
from tools.harness import precision_of


def test_both_sides_of_a_comparison_compute_in_the_precision_that_is_named() -> None:
    named = ["rollout.dtype=float32", "update.precision=fp32"]
    config = load_config("demo", named)
    assert precision_of(config) == named
    assert trl_settings(config, 1)["precision"] == "fp32"
    assert not any(each["bf16_copy"] for each in trl_candidates("fp32"))
    assert len(trl_candidates("fp32")) == len(trl_candidates("bf16")) - 1
    iteration = Iteration(1, 2.0, {"rollout": 1.0, "update": 1.0, "rest": 0.0}, 10.0, 2.0, 0.0)
    row = Measured.of([Round([iteration], 1)]).row("EARL", config.update.precision)
    assert row["precision"] == "fp32"

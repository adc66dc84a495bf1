"""Results of several ranks made one, against numpy over all of the ranks' numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.cluster.rpc import Rule, merge_results, same_results

RULES: dict[str, Rule] = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "count": "sum",
    "seconds": "max",
}


def of_rank(values: list[float], shard: int) -> dict[str, Any]:
    metrics: dict[str, float] = {"seconds": float(shard), "count": float(len(values))}
    if values:
        there = np.array(values)
        metrics |= {
            "mean": float(there.mean()),
            "std": float(there.std()),
            "min": float(there.min()),
            "max": float(there.max()),
        }
    return {"shards": [{"shard": shard}], "metrics": metrics, "weight": len(values)}


numbers = st.lists(st.floats(-100, 100), max_size=6)


@given(st.lists(numbers, min_size=2, max_size=5))
def test_metrics_of_ranks_are_those_of_all_their_numbers(ranks: list[list[float]]) -> None:
    merged = merge_results([of_rank(rank, at) for at, rank in enumerate(ranks)], RULES)
    together = of_rank([value for rank in ranks for value in rank], len(ranks) - 1)
    assert merged["metrics"] == pytest.approx(together["metrics"], abs=1e-9)
    assert [shard["shard"] for shard in merged["shards"]] == list(range(len(ranks)))


def test_one_ranks_metrics_are_left_as_they_are() -> None:
    alone = of_rank([0.1, 0.2, 0.7], 4)
    assert merge_results([alone], {}) == {"shards": alone["shards"], "metrics": alone["metrics"]}


def test_means_over_nothing_are_the_first_ranks() -> None:
    empty = {"shards": [], "metrics": {"mean": 0.0, "std": 0.0}, "weight": 0}
    assert merge_results([empty, empty], RULES)["metrics"] == {"mean": 0.0, "std": 0.0}


def test_a_metric_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="surprise"):
        merge_results([{"metrics": {"surprise": 1.0}, "weight": 1}] * 2, RULES)


def test_what_ranks_did_together_is_the_first_ranks_with_the_shards_of_all() -> None:
    ranks = [{"version": 3, "loss": loss, "shards": [{"rank": loss}]} for loss in (1.0, 2.0)]
    together = same_results(ranks, ["version"])
    assert together == {"version": 3, "loss": 1.0, "shards": [{"rank": 1.0}, {"rank": 2.0}]}
    assert same_results([{"version": 3}] * 2, ["version"]) == {"version": 3}
    with pytest.raises(ValueError, match=r"different version: \[3, 3, 4\]"):
        same_results([*ranks, {"version": 4, "shards": []}], ["version"])

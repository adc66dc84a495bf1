"""What the ranks of a group returned for one stage, as one result. Pure functions over JSON.

A rank returns `{"shards": [...], "metrics": {name: number}, "weight": n}`: `weight` is how many
things (episodes, tokens) its means are over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Rule = Literal["sum", "max", "min", "mean", "std"]
"""How one metric of several ranks becomes one.

`mean`: weighted by the ranks' weights. `std`: the population standard deviation of all ranks'
things together; the metric of the same name with `mean` in place of `std` must be there too.
Ranks without weight have no part in `mean`, `std`, `min` and those of `max` that they do not name.
"""


def merge_results(
    results: Sequence[Mapping[str, Any]], rules: Mapping[str, Rule]
) -> dict[str, Any]:
    """All shards in rank order, and the metrics merged by their rules.

    The metrics of a single rank are returned as they are. Raises `ValueError` for a metric
    without a rule.
    """
    shards = [shard for result in results for shard in result.get("shards", ())]
    if len(results) == 1:
        return {"shards": shards, "metrics": dict(results[0]["metrics"])}
    names = dict.fromkeys(name for result in results for name in result["metrics"])
    unruled = sorted(set(names) - set(rules))
    if unruled:
        raise ValueError(f"say how the metrics {unruled} of several ranks are merged: add rules")
    return {"shards": shards, "metrics": {name: _merged(name, rules, results) for name in names}}


def same_results(results: Sequence[Mapping[str, Any]], agreed: Sequence[str]) -> dict[str, Any]:
    """The first rank's result; its shards, if it has any, are those of all ranks in their order.

    For ranks that do one thing together and report what is true of all of them. Raises
    `ValueError` when they do not return the same under the names `agreed`.
    """
    for name in agreed:
        values = [result[name] for result in results]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks of one group returned different {name}: {values}")
    together = dict(results[0])
    if "shards" in together:
        together["shards"] = [shard for result in results for shard in result["shards"]]
    return together


def _merged(name: str, rules: Mapping[str, Rule], results: Sequence[Mapping[str, Any]]) -> float:
    having = [result for result in results if name in result["metrics"]]
    values = [float(result["metrics"][name]) for result in having]
    rule = rules[name]
    if rule == "sum":
        return math.fsum(values)
    if rule == "max":
        return max(values)
    if rule == "min":
        return min(values)
    weights = [float(result["weight"]) for result in having]
    total = math.fsum(weights)
    if not total:
        return values[0]
    if rule == "mean":
        return _weighted(values, weights)
    means = [float(result["metrics"][name.removesuffix("std") + "mean"]) for result in having]
    center = _weighted(means, weights)
    squares = [std**2 + (mean - center) ** 2 for std, mean in zip(values, means, strict=True)]
    return math.sqrt(_weighted(squares, weights))


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = zip(values, weights, strict=True)
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weights)

"""Rows that a tiny model solves now and then, and what the rows of a run must have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

from earl_core.trajectory.samples import derive_seed

ROWS = Path(__file__).with_name("digit_rows.jsonl")
COUNT = 16
MEMORY = 0.9
RULE = {"memory": MEMORY, "passing_reward": 0.5}

ENVIRONMENT: dict[str, Any] = {
    "name": "prompt",
    "label": "rows",
    "options": {"path": str(ROWS), "reward_function": f"{__name__}:digits"},
    "curriculum": RULE,
}


def digits(completion: str, row: dict[str, Any]) -> float:
    """Whether the answer has one of the digits that the row asks for; some ask for none."""
    return float(bool(set(completion) & set(row["answer"])))


def check_rows(run: Path, label: str, iterations: int, staleness: int) -> list[list[int]]:
    """Check the rows of each iteration against those that its kept episodes up to k - 1 - staleness
    lead to; read and computed without EARL's own code. Returns them."""
    seed = yaml.safe_load((run / "config.yaml").read_text())["seed"]
    results: list[dict[int, list[float]]] = []
    drawn: list[list[int]] = []
    for k in range(iterations):
        alpha, beta = np.ones(COUNT), np.ones(COUNT)
        for j in range(k - staleness):
            weight = MEMORY ** (k - 1 - staleness - j)
            for row, rewards in results[j].items():
                for reward in rewards:
                    (alpha if reward >= RULE["passing_reward"] else beta)[row] += weight
        bits = np.random.Philox(key=derive_seed(seed, k, "rows", label))
        ranked = np.abs(np.random.Generator(bits).beta(alpha, beta) - 0.5).argsort().tolist()
        table = pq.read_table(run / f"iterations/{k:06d}/episodes.parquet").to_pylist()
        episodes = {each["episode_id"]: each for each in table if each["environment"] == label}
        groups = {each["group_id"]: each["prompt_id"] for each in episodes.values()}
        drawn.append([groups[group] for group in sorted(groups)])
        assert drawn[-1] == ranked[: len(groups)], k
        results.append({row: [] for row in drawn[-1]})
        for each in episodes.values():
            results[-1][each["prompt_id"]].append(each["reward"])
    # Otherwise there is nothing to learn of rows.
    assert len({reward for each in results for found in each.values() for reward in found}) == 2
    return drawn

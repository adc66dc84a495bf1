"""Whole runs whose episodes are scored by functions."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from tests.flows.runs import Runs


@pytest.mark.slow
def test_scoring_is_repeated_and_the_rollout_is_not(runs: Runs) -> None:
    """The judge is down; it is up again, and the run is stopped as it seals; it goes on."""
    seen = runs.directory / "seen.txt"

    def functions(**options: object) -> tuple[str, ...]:
        turns = {
            "function": "tests.experience.scoring_functions:turns",
            "weight": 0.5,
            "options": {"seen": str(seen), **options},
        }
        # Nobody asks for more than what is scored.
        return "guard=off", "reward.retries=0", f"reward.functions={json.dumps([turns])}"

    first, second, last = runs.train_here(
        {"overrides": functions(down=True)},
        {"overrides": functions(), "fault": "reward.seal@1=raise"},
        {"overrides": functions()},
    )
    assert "episodes have no reward" in str(first)
    assert "ConnectionError: the judge is down" in str(first)
    assert "injected failure" in str(second)
    assert last is None
    sealed = Counter(runs.executed("sealed"))
    for iteration in range(2):
        assert sealed[iteration, "rollout"] == sealed[iteration, "reward"] == 1
    numbers = Counter(map(int, seen.read_text().split()))
    assert numbers == {number: 1 if number < 16 else 2 for number in range(32)}
    for iteration, metrics in enumerate(runs.metrics()):
        kept = pq.read_table(runs.run() / f"iterations/{iteration:06d}/episodes.parquet")
        rows = kept.to_pylist()
        assert len(rows) == 16
        for row in rows:
            assert json.loads(row["scores"]) == {"turns": row["turns"] / 10}
            total = sum(row["turn_rewards"]) + 0.5 * row["turns"] / 10
            assert row["reward"] == pytest.approx(total, abs=1e-6)
        means = {name: sum(row[name] for row in rows) / 16 for name in ("turns", "reward")}
        assert metrics["reward/of/turns/mean"] == pytest.approx(means["turns"] / 10)
        assert metrics["reward/mean"] == pytest.approx(means["reward"], abs=1e-6)
        assert metrics["reward/episodes_failed"] == 0
    runs.assert_learnt()
    assert runs.shared_memory() == []

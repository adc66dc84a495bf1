"""A whole run of an agent whose conversations have roles, rated by people."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.flows.runs import LEARNING, Runs

AGENT = {"agent": "tests.rollout.agents:pair"}


@contextmanager
def people(directory: Path) -> Iterator[list[str]]:
    """Rate each episode once, a quarter for each digit of its number; gives who was rated."""
    rated: list[str] = []
    over = threading.Event()

    def rate() -> None:
        while not over.wait(0.05):
            for asked in directory.glob("episodes/*.json"):
                if asked.name not in rated:
                    rated.append(asked.name)
                    score = {"score": len(asked.name.partition("-")[0]) / 4}
                    (directory / "scores" / asked.name).write_text(json.dumps(score))

    thread = threading.Thread(target=rate)
    thread.start()
    yield rated
    over.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_roles_are_trained_by_their_own_returns_and_later_ratings(
    runs: Runs, tmp_path: Path, mode: str
) -> None:
    options = {"directory": str(tmp_path / "ratings"), "poll_seconds": 0.1, "deadline_seconds": 300}
    functions = [{"function": "later", "label": "people", "options": options}]
    overrides = (
        *LEARNING,
        "iterations=2",
        f"environment={json.dumps(AGENT)}",
        f"reward.functions={json.dumps(functions)}",
        "algorithm.advantage=dr_grpo",
        *(
            ["schedule.mode=stream", "schedule.staleness=1", "algorithm.importance_correction={}"]
            if mode == "stream"
            else []
        ),
    )
    with people(tmp_path / "ratings") as rated:
        assert runs.train_here({"overrides": [*overrides]}) == [None]
    spreads = []
    for iteration, line in enumerate(runs.metrics()):
        kept = runs.run() / f"iterations/{iteration:06d}/episodes.parquet"
        rows = pq.read_table(kept).to_pylist()
        assert {row["role"] for row in rows} == {"planner", "solver"}
        for role in ("planner", "solver"):
            parts = [row for row in rows if row["role"] == role]
            own = np.array([sum(row["turn_rewards"]) + row["shared_reward"] for row in parts])
            returns = own + [json.loads(row["scores"])["people"] for row in parts]
            assert line[f"reward/of_role/{role}/mean"] == pytest.approx(returns.mean(), abs=1e-6)
            assert line[f"reward/of_role/{role}/std"] == pytest.approx(returns.std(), abs=1e-6)
            spreads.append(own.std())
        assert line["update/grad_norm"] > 0 or not max(spreads[-2:])
    assert max(spreads) > 0.01
    assert len(rated) == len({*rated}) >= 2 * runs.metrics()[1]["rollout/episodes"]

"""Whole runs on several environments, with a curriculum and suites."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from earl_core.run.recovery import go_back
from tests.flows.digit_rows import ENVIRONMENT, check_rows
from tests.flows.runs import KILLED, LEARNING, Runs
from tests.flows.test_stream import train

GAME = {"name": "tic_tac_toe", "options": {"style": "compact"}}
PERFECT = {"name": "tic_tac_toe", "options": {"style": "compact", "opponent": "perfect"}}
MIXED = (
    *LEARNING,
    "iterations=3",
    "environment=null",
    "environments="
    + json.dumps(
        [
            {**GAME, "label": "weak", "weight": 2},
            ENVIRONMENT,
            {"agent": "tests.rollout.agents:tic_tac_toe", "options": {"game": GAME["options"]}},
        ]
    ),
    "curriculum={memory: 0.5}",
)
SUITES = (
    "evaluation.every=2",
    "evaluation.episodes=8",
    "evaluation.suites="
    + json.dumps(
        [
            {**PERFECT, "label": "perfect", "prompts": 4, "attempts": 2, "passing_return": 0.5},
            {**GAME, "label": "rare", "prompts": 4, "every": 2},
        ]
    ),
)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_mixture_with_a_curriculum_resumes_bit_for_bit(runs: Runs) -> None:
    overrides = [*MIXED, "name=whole"]
    assert runs.train_here({"overrides": overrides}) == [None]
    rows = check_rows(runs.run("whole"), "rows", 3, 0)
    # What is done again is equal.
    assert runs.train_here({"overrides": overrides, "go_back": 1}) == [None]
    assert check_rows(runs.run("whole"), "rows", 3, 0) == rows
    runs.train(*MIXED, *SUITES, fault="update.after@1=kill", expect=KILLED)
    runs.train(*MIXED, *SUITES)
    runs.assert_learnt()
    assert check_rows(runs.run(), "rows", 3, 0) == rows
    for iteration in range(3):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
        here, there = (
            json.loads((runs.run(name) / f"iterations/{iteration:06d}/rollout.json").read_text())
            for name in ("run", "whole")
        )
        assert here["outputs"]["cursor"] == there["outputs"]["cursor"]
    cursor = here["outputs"]["cursor"]
    assert set(cursor) == {"weak", "rows", "tic_tac_toe"}
    assert sum(place["drawn"] for place in cursor.values()) == 3 * 8
    # What the groups showed moves the parts away from 2:1:1.
    assert all(place["spread"] is not None for place in cursor.values())
    first = runs.metrics()[0]
    assert first["rollout/of/weak/episodes"] == 16.0
    assert first["rollout/of/rows/episodes"] == first["rollout/of/tic_tac_toe/episodes"] == 8.0
    assert first["rollout/of/rows/rows/known_share"] == 0.0
    assert first["rollout/of/rows/rows/expected_success"] == 0.5
    assert runs.metrics()[2]["rollout/of/rows/rows/known_share"] > 0.0
    check_suites(runs)


@pytest.mark.slow
def test_a_mixture_with_a_curriculum_plays_as_a_stream(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each environment, an agent among them, each prompt is played once, stopped on the way or
    not; what the groups of iterations up to k - 2 have returned moves the parts of batch k, and
    chooses its rows, also when the run has gone back."""
    asked = (
        *MIXED,
        "iterations=5",
        "schedule={staleness: 1, mode: stream}",
        "algorithm.importance_correction={}",
        "algorithm.kl={placement: loss, coefficient: 0.1}",
        "rollout.max_running_requests=16",
    )
    monkeypatch.setenv("EARL_CLOCK", "0")
    monkeypatch.setenv("EARL_FAULT", "update.step0@2=raise")
    with pytest.raises(Exception, match=r"update\.step0@2"):
        train(runs, *asked)
    monkeypatch.delenv("EARL_FAULT")
    train(runs, *asked)
    runs.assert_learnt()
    prompts: dict[str, list[int]] = {}
    parts = []
    for k in range(5):
        folder = runs.run() / f"iterations/{k:06d}"
        rows = pq.read_table(folder / "episodes.parquet").to_pylist()
        assert {row["group_id"] for row in rows} == set(range(8 * k, 8 * (k + 1)))
        drawn = sorted({(row["group_id"], row["environment"], row["prompt_id"]) for row in rows})
        for _, label, prompt in drawn:
            prompts.setdefault(label, []).append(prompt)
        cursor = json.loads((folder / "collect.json").read_text())["outputs"]["cursor"]
        parts.append({label: place["due"] for label, place in cursor.items()})
        assert all((place["spread"] is None) == (k < 2) for place in cursor.values())
    rows = prompts.pop("rows")
    assert all(each == [*range(len(each))] for each in prompts.values())
    drawn = check_rows(runs.run(), "rows", 5, 1)
    assert rows == [row for each in drawn for row in each]
    # By their weights alone each batch would end with nothing due.
    assert all(due == pytest.approx(0) for due in parts[1].values())
    assert any(due != pytest.approx(0) for due in parts[4].values())
    go_back(runs.run(), 3)
    train(runs, *asked)
    assert check_rows(runs.run(), "rows", 5, 1) == drawn


def check_suites(runs: Runs) -> None:
    """Versions 0, 2 and 3 are evaluated; the rare suite is played in the first and the last."""
    for version, labels in ((0, {"perfect", "rare"}), (2, {"perfect"}), (3, {"perfect", "rare"})):
        path = runs.run() / f"iterations/{version:06d}/evaluation.json"
        outputs = json.loads(path.read_text())["outputs"]
        assert set(outputs["suites"]) == labels
        suite = outputs["suites"]["perfect"]
        assert suite["episodes"] == 8
        assert suite["pass"]["1"]["share"] <= suite["pass"]["2"]["share"]

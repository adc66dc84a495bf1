"""Whole runs on several environments, with a curriculum and suites."""

from __future__ import annotations

import json

import pytest

from tests.flows.runs import KILLED, LEARNING, Runs

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
            {**PERFECT, "label": "strong"},
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
def test_a_mixture_with_a_curriculum_resumes_bit_for_bit(runs: Runs) -> None:
    whole = runs.train_here({"overrides": [*MIXED, "name=whole"]})
    assert whole == [None]
    runs.train(*MIXED, *SUITES, fault="update.after@1=kill", expect=KILLED)
    runs.train(*MIXED, *SUITES)
    runs.assert_learnt()
    for iteration in range(3):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
        here, there = (
            json.loads((runs.run(name) / f"iterations/{iteration:06d}/rollout.json").read_text())
            for name in ("run", "whole")
        )
        assert here["outputs"]["cursor"] == there["outputs"]["cursor"]
    cursor = here["outputs"]["cursor"]
    assert set(cursor) == {"weak", "strong", "tic_tac_toe"}
    assert sum(place["drawn"] for place in cursor.values()) == 3 * 8
    # What the groups showed moves the parts away from 2:1:1.
    assert all(place["spread"] is not None for place in cursor.values())
    first = runs.metrics()[0]
    assert first["rollout/of/weak/episodes"] == 16.0
    assert first["rollout/of/strong/episodes"] == first["rollout/of/tic_tac_toe/episodes"] == 8.0
    check_suites(runs)


def check_suites(runs: Runs) -> None:
    """Versions 0, 2 and 3 are evaluated; the rare suite is played in the first and the last."""
    for version, labels in ((0, {"perfect", "rare"}), (2, {"perfect"}), (3, {"perfect", "rare"})):
        path = runs.run() / f"iterations/{version:06d}/evaluation.json"
        outputs = json.loads(path.read_text())["outputs"]
        assert set(outputs["suites"]) == labels
        suite = outputs["suites"]["perfect"]
        assert suite["episodes"] == 8
        assert suite["pass"]["1"]["share"] <= suite["pass"]["2"]["share"]

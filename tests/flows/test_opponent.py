"""A whole run of a game whose opponent is the policy itself."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from tests.flows.runs import KILLED, LEARNING, Runs

GAME = {"style": "compact", "opponent": "policy"}
OPPOSED = (*LEARNING, "iterations=2", f"environment.options={json.dumps(GAME)}")
SUITE = {"label": "self", "name": "tic_tac_toe", "options": GAME, "prompts": 4}
EVALUATED = (
    "evaluation.every=2",
    "evaluation.episodes=8",
    f"evaluation.suites={json.dumps([SUITE])}",
)


@pytest.mark.slow
def test_one_side_learns_against_itself_and_resumes_bit_for_bit(runs: Runs) -> None:
    runs.train(*OPPOSED, fault="rollout.seal@1=kill", expect=KILLED)
    whole = {"overrides": [*OPPOSED, "name=whole"]}
    both = {"overrides": [*OPPOSED, "name=both", "iterations=1", "environment.train=all"]}
    assert runs.train_here({"overrides": [*OPPOSED, *EVALUATED]}, whole, both) == [None] * 3
    runs.assert_learnt()
    for iteration in range(2):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
    assert_both_sides(runs)
    for line in runs.metrics():
        assert line["rollout/opponent_calls"] > 0
        assert line["rollout/environment/opponent_illegal_answers"] >= 0
        assert line["rollout/episodes_failed"] == line["rollout/episodes_retried"] == 0
        trained = line["rollout/generated_tokens"] - line["rollout/opponent_tokens"]
        turns = line["rollout/turns/mean"] * line["rollout/episodes"]
        assert trained == pytest.approx(turns * line["rollout/tokens_per_turn"])
    evaluation = json.loads((runs.run() / "iterations/000002/evaluation.json").read_text())
    assert evaluation["outputs"]["suites"]["self"]["episodes"] == 4


def assert_both_sides(runs: Runs) -> None:
    """The same games; the opponent's conversations are trained beside them, by what it was paid."""
    alone, (both,) = runs.metrics("whole")[0], runs.metrics("both")
    for name in ("reward/mean", "rollout/turns/mean", "rollout/opponent_tokens"):
        assert both[name] == alone[name]
    own, opponents = both["reward/of_role/unnamed/mean"], both["reward/of_role/opponent/mean"]
    assert own == pytest.approx(both["reward/mean"])
    assert own != pytest.approx(opponents)
    rows = pq.read_table(runs.run("both") / "iterations/000000/episodes.parquet").to_pylist()
    paid = [sum(row["turn_rewards"]) for row in rows if row["role"] == "opponent"]
    assert opponents == pytest.approx(sum(paid) / len(paid))
    assert runs.weights(0, "both") != runs.weights(0, "whole")

"""Engines and ranks over time, and who waited for whom, by the lines of a ledger."""

from __future__ import annotations

from typing import Any

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from tasks.reports.run_page.occupancy import MOST_ITERATIONS, occupancy


def line(time: float, iteration: int, stage: str, event: str, attempt: int = 2) -> dict[str, Any]:
    return {
        "time": time, "attempt": attempt, "iteration": iteration, "stage": stage, "event": event,
    }  # fmt: skip


def played(time: float, iteration: int, engine: int, seconds: float) -> dict[str, Any]:
    event = f"engine {engine} played prompts 0 to 3 in {seconds:.3f} s"
    return line(time, iteration, "rollout", event)


PLANS = [
    DeploymentPlan(
        iteration=iteration, stages={"update": StageDeployment("update", replicas=2)}, reasons={}
    )
    for iteration in range(2)
]
LEDGER = [
    line(50.0, 0, "rollout", "started", attempt=1),
    line(60.0, 0, "rollout", "sealed", attempt=1),
    line(100.0, 0, "rollout", "started"),
    played(104.0, 0, 1, 4.0),
    played(110.0, 0, 0, 10.0),
    line(110.0, 0, "rollout", "sealed"),
    line(110.0, 0, "reward", "started"),
    line(110.5, 0, "reward", "sealed"),
    line(110.5, 0, "update", "started"),
    line(120.5, 0, "update", "sealed"),
    # Engine 1 has gone on; engine 0 waits for the update.
    played(112.0, 1, 1, 8.0),
    played(125.5, 1, 0, 5.0),
    line(125.5, 1, "update", "started"),
    line(130.5, 1, "update", "sealed"),
]


def test_engines_and_ranks_have_lanes_and_waits_have_causes() -> None:
    found = occupancy(LEDGER, PLANS)
    spans = [(s["lane"], s["stage"], s["begin"], s["length"]) for s in found["spans"]]
    assert spans == [
        ("engine 0", "rollout", 0.0, 10.0),
        ("engine 0", "", 10.0, 10.5),
        ("engine 0", "rollout", 20.5, 5.0),
        ("engine 1", "rollout", 0.0, 4.0),
        ("engine 1", "rollout", 4.0, 8.0),
        ("2 update ranks", "update", 10.5, 10.0),
        ("2 update ranks", "", 20.5, 5.0),
        ("2 update ranks", "update", 25.5, 5.0),
        ("rewards", "reward", 10.0, 0.5),
    ]
    assert found["waits"] == [
        {"lane": "engine 0", "cause": "update on 2 update ranks", "seconds": 10.5, "share": 34.4},
        {"lane": "2 update ranks", "cause": "rollout on engine 0", "seconds": 5.0, "share": 16.4},
    ]
    assert found["spans"][1]["text"] == "engine 0: waits for update 0 on 2 update ranks, 10.5 s"


def test_a_ledger_without_stages_has_no_strip() -> None:
    nothing: dict[str, Any] = {"spans": [], "waits": []}
    assert occupancy([], []) == nothing
    assert occupancy([line(1.0, -1, "run", "failed")], []) == nothing


def test_the_last_iterations_are_shown() -> None:
    ledger = [
        each
        for k in range(MOST_ITERATIONS + 5)
        for each in (
            line(10.0 * k, k, "update", "started"),
            line(10.0 * k + 9, k, "update", "sealed"),
        )
    ]
    busy = [span for span in occupancy(ledger, [])["spans"] if span["stage"]]
    assert len(busy) == MOST_ITERATIONS
    assert busy[-1]["text"] == f"update rank: update {MOST_ITERATIONS + 4}, 9.0 s"

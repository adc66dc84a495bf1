"""Which events of work that goes on become lines of a log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from earl_core.models.progress import ticking
from flows import running
from flows.progress import Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def played(done: int) -> dict[str, Any]:
    return {"episodes_done": done, "episodes": 256}


def test_an_evaluation_is_told_of_from_its_first_seconds_on_and_not_too_often() -> None:
    clock = Clock()
    pace = Pace(clock)
    lines = []
    pace.heard("evaluation", 0, {"stage_started": True})
    for clock.now in range(61):
        lines.append((clock.now, pace.line("evaluation", 0, played(2 * int(clock.now)))))
    told = [(when, line) for when, line in lines if line]
    assert [when for when, _ in told] == [2, 12, 22, 32, 42, 52]
    assert told[0][1] == "evaluation of policy version 0 4/256 episodes"
    clock.now = 61
    assert pace.line("evaluation", 0, played(130)).endswith("130/256 episodes"), "half is told"
    assert not pace.line("evaluation", 0, played(131))


@pytest.mark.parametrize(
    ("stage", "event", "text"),
    [
        ("rollout", {"starting": "rollout"}, "starting the rollout worker"),
        ("model", {"building": "models/x"}, "building the model models/x"),
        ("model", {"downloading": "a/x"}, "downloading the model a/x from the model hub"),
        ("profile", {"say": "measuring 3 of 20"}, "measuring 3 of 20"),
        ("update", {"stage_started": True}, "iteration 4: update"),
    ],
)
def test_silent_work_is_named_every_ten_seconds(
    stage: str, event: dict[str, Any], text: str
) -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.heard(stage, 4, event)
    told = []
    for clock.now in range(30):
        told.append(pace.still())
    assert [line for line in told if line] == [f"still {text} (10 s)", f"still {text} (20 s)"]
    pace.line("update", 4, {"samples_done": 3, "samples": 48})
    clock.now = 40
    assert pace.still() == "still iteration 4: update 3/48 samples (40 s)", "the newest numbers"
    pace.heard(stage, 4, {"metrics": {}})
    clock.now = 60
    assert not pace.still(), "what has ended does not go on"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"steps_done": 40, "steps": 80}, "the model: 40/80 steps"),
        ({"MB_done": 200.4, "MB": 269.0}, "the model: 200/269 MB"),
    ],
)
def test_how_far_a_model_is(event: dict[str, Any], text: str) -> None:
    assert Pace().line("model", 0, event) == text


def test_the_flow_log_has_the_lines_of_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flows.running")
    heard: list[dict[str, Any]] = []
    running.set_listener(lambda stage, iteration, event: heard.append(event))
    try:
        running.heard("evaluation", 3, {"starting": "rollout"})
        running.heard("evaluation", 3, played(255))
    finally:
        running.set_listener(None)
    assert caplog.messages == [
        "starting the rollout worker",
        "evaluation of policy version 3 255/256 episodes",
    ]
    assert len(heard) == 2


def test_ticks_end_with_their_block() -> None:
    ticks: list[int] = []
    with ticking(lambda: ticks.append(1), seconds=0.005):
        while len(ticks) < 3:
            pass
    count = len(ticks)
    assert count == len(ticks)

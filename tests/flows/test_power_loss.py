"""The machine loses power between any two seals of an iteration: processes and shared memory are
gone, the run directory stays. The run goes on, with other settings too, and no update counts twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.flows.runs import Runs

POINTS = (
    "select.after",
    "rollout.after",
    "reward.after",
    "reference.after",
    "advantage.after",
    "update.seal",
    "update.after",
    "publish.after",
    "stable.before",
    "stable.after",
)
"""Every place between two seals, what precedes the update's while its checkpoint is on disk, and
both sides of STABLE."""

USUAL = tuple(
    point for point in POINTS if point not in ("update.after", "publish.after", "stable.before")
)
"""Those that are not in `SOME` with a change besides."""

CHANGES = {
    "select": "update.max_tokens_per_microbatch={}",
    "rollout": "rollout.temperature={}",
    "environment": "rollout.max_failed_share={}",
    "advantage": "algorithm.advantage={}",
    "reference": "algorithm.kl={{placement: loss, coefficient: {}}}",
    "update": "update.learning_rate={}",
    "publish": "rollout.dtype={}",
    "checkpoint": "checkpoint.keep_last={}",
    "sparse": "checkpoint.every={}",
}
VALUES = {
    "select": ("64", "128"),
    "rollout": ("0.9", "1.1"),
    "environment": ("0.4", "0.6"),
    "advantage": ("grpo", "rloo"),
    "reference": ("0.02", "0.03"),
    "update": ("2e-3", "1e-3"),
    "publish": ("bfloat16", "float32"),
    "checkpoint": ("3", "4"),
    "sparse": ("2", "1"),
}
"""What a resume may change, by the stage whose key or work it is in; two values each, in turn."""

SOME = (
    ("update.seal", "advantage"),
    ("publish.after", "update"),
    ("stable.before", "reference"),
    # The last, because a change after it would reach back to the last STABLE checkpoint, and the
    # power loss leaves one that the calm run has not.
    ("update.after", "sparse"),
)
MANY = (
    *(
        ("update.after", stage)
        for stage in ("update", "publish", "checkpoint", "select", "rollout")
    ),
    ("stable.after", "environment"),
    *tuple(itertools.product(POINTS, [stage for stage in CHANGES if stage != "sparse"]))[::7],
)
"""Pairs beside those of `SOME`, and every seventh of all: every point and change is in it."""

Step = dict[str, Any]


def off(point: str, iteration: int, overrides: Sequence[str] = ()) -> Step:
    fault = f"{point}@{iteration}=raise"
    return {"overrides": list(overrides), "fault": fault, "lose_memory": True}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("points", "minibatches"),
    [
        pytest.param(USUAL, 2, id="usual"),
        pytest.param(POINTS, 2, id="with shards", marks=pytest.mark.campaign),
        pytest.param(POINTS, 1, id="without shards", marks=pytest.mark.campaign),
    ],
)
def test_power_lost_between_all_seals_of_an_iteration(
    points: Sequence[str], minibatches: int, runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Again and again in one iteration. With several minibatches the update has shards to lose."""
    settings = [f"update.minibatches={minibatches}"]
    steps = [off(point, 1, settings) for point in points]
    *endings, last = runs.train_here(*steps, {"overrides": settings})
    for point, ending in zip(points, endings, strict=True):
        assert ending == f"RuntimeError: injected failure at {point}@1", endings
    assert last is None
    whole = undisturbed(*settings)
    for iteration in range(2):
        assert runs.weights(iteration) == whole.weights(iteration)
    assert [line["iteration"] for line in runs.metrics()][-1] == 1
    assert runs.shared_memory() == []


def story(cases: Sequence[tuple[str, str]]) -> tuple[list[Step], list[Step]]:
    """Iteration after iteration, a power loss at a point and a setting changed on the resume; and
    the same changes made before those iterations begin, with nothing lost."""
    cut: list[Step] = []
    calm: list[Step] = []
    turns = {stage: itertools.cycle(values) for stage, values in VALUES.items()}
    settings: dict[str, str] = {"iterations": f"iterations={len(cases) + 2}"}
    for iteration, (point, stage) in enumerate(cases, start=1):
        before = list(settings.values())
        cut.append(off(point, iteration, before))
        # What STABLE covers keeps the settings that it was made with.
        begin = iteration + (point == "stable.after")
        calm.append({"overrides": [*before, "name=calm"], "fault": f"select.before@{begin}=raise"})
        settings[stage] = CHANGES[stage].format(next(turns[stage]))
    cut.append({"overrides": list(settings.values())})
    calm.append({"overrides": [*settings.values(), "name=calm"]})
    return cut, calm


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, id="some", marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
        pytest.param(MANY, id="many", marks=[pytest.mark.campaign, pytest.mark.timeout(3600)]),
    ],
)
def test_power_lost_and_settings_changed(cases: Sequence[tuple[str, str]], runs: Runs) -> None:
    """What was sealed under other settings is done anew, from the state that it started from."""
    cut, calm = story(cases)
    endings = runs.train_here(*cut, *calm)
    for step, ending in zip([*cut, *calm], endings, strict=True):
        place = step.get("fault", "").partition("=")[0]
        wanted = f"RuntimeError: injected failure at {place}" if place else None
        assert ending == wanted, (step, endings)
    last = len(cases) + 1
    runs.assert_learnt()
    assert runs.weights(last) == runs.weights(last, "calm")
    assert runs.shared_memory() == []

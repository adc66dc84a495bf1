"""`schedule.replay`: what it says of a batch, and what cannot work."""

from __future__ import annotations

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.config.schedule import ReplayConfig
from flows.cli.debugging import for_one_process
from tests.config.test_config import streaming, with_

STREAM = {"staleness": 2, "mode": "stream"}


def replaying(share: float = 0.25, max_age: int = 3, **changes: object) -> dict[str, object]:
    """Six iterations of four groups."""
    return streaming() | {
        "iterations": 6,
        "schedule": {**STREAM, "replay": {"share": share, "max_age": max_age}, **changes},
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            with_(iterations=3, schedule={"replay": {"share": 0.5, "max_age": 2}}),
            "with schedule.mode `pinned` none are: set mode to `stream` and staleness to 1 or more",
        ),
        (
            replaying() | {"algorithm": {}},
            "nothing corrects for that: set algorithm.importance_correction",
        ),
        (replaying(share=0.0), "0 is no part of a batch .* such as 0.25, or leave schedule.replay"),
        (replaying(share=1.0), "1 is no part of a batch"),
        (replaying(share=-0.5), "-0.5 is no part of a batch"),
        (replaying(share=float("nan")), "share"),
        (replaying(max_age=0), "max_age"),
        (replaying(max_age=2), "max_age is 2, .* up to 3 versions old .* set max_age to 3 or more"),
        (
            replaying(share=0.1),
            "share is 0.1, which beside 4 new groups is less than one: set share to 0.2 or more",
        ),
        (replaying(share=0.25, least=1), "schedule.replay.least|least: unknown key"),
        (replaying() | {"iterations": 2}, "schedule.staleness .2. must be below iterations .2."),
    ],
)
def test_replay_that_cannot_work_is_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    ("share", "prompts", "groups"),
    [
        (0.25, 12, 4),
        (0.2, 4, 1),
        (0.5, 7, 7),
        (0.1, 9, 1),
        (0.1, 17, 1),
        (0.3, 7, 3),
        (0.75, 5, 15),
    ],
)
def test_a_share_is_of_the_whole_batch(share: float, prompts: int, groups: int) -> None:
    replay = ReplayConfig(share=share, max_age=3)
    assert replay.groups(prompts) == groups
    # No more groups are young enough.
    assert ReplayConfig(share=share, max_age=1).groups(prompts) == min(groups, prompts)
    assert groups / (prompts + groups) <= share < (groups + 1) / (prompts + groups + 1)


def test_too_few_prompts_for_a_share_are_debugged_without_replay() -> None:
    """Workers parse what `earl debug` has made of the configuration."""
    raw = replaying(share=0.25)
    raw["rollout"] = {**streaming()["rollout"], "prompts_per_iteration": 12}
    config = parse_config(raw)
    few, notes = for_one_process(config, 2)
    assert parse_config(few.model_dump(mode="json")).schedule.replay is None
    assert any(note.startswith("no group is trained again") for note in notes)
    for prompts in (3, None):
        assert for_one_process(config, prompts)[0].schedule == config.schedule


def test_replay_is_part_of_the_schedule() -> None:
    config = parse_config(replaying())
    assert config.schedule.trained_again == 3
    assert parse_config(streaming()).schedule.trained_again == 0

"""KL penalties: whose reference, what coefficient, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.config.run import RunConfig

GAME = {"name": "tic_tac_toe"}


def config(*environments: dict[str, Any], **kl: Any) -> RunConfig:
    played: dict[str, Any] = {"environment": GAME}
    if environments:
        labelled = [{**GAME, "label": f"e{i}", **each} for i, each in enumerate(environments)]
        played = {"environments": labelled}
    return parse_config(
        {
            "name": "run",
            "iterations": 5,
            "model": {"path": "model"},
            "rollout": {"prompts_per_iteration": 8, "group_size": 4, "max_turns": 5},
            "algorithm": {"kl": kl},
            **played,
        }
    )


def test_the_coefficient_falls_in_a_straight_line() -> None:
    falling = config(placement="loss", coefficient=0.8, until=4).penalty("")
    assert [falling.at(k) for k in range(6)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert config(placement="loss", coefficient=0.8).penalty("").at(10**6) == 0.8


def test_environments_have_penalties_of_their_own() -> None:
    anchor = {"kl": {"reference": "initial", "coefficient": 0.1}, "reward_weight": 0}
    found = config({}, anchor, {"kl": {"reference": "old", "coefficient": 1}}, placement="loss")
    assert found.references == ("initial", "old")
    assert [found.penalty(f"e{i}").coefficient for i in range(3)] == [0.0, 0.1, 1.0]
    assert [found.own_weight(f"e{i}") for i in range(3)] == [1.0, 0.0, 1.0]
    assert not found.one_penalty
    assert config({}, {}, placement="loss", coefficient=0.1).one_penalty


@pytest.mark.parametrize(
    ("environments", "kl", "said"),
    [
        ((), {"placement": "loss"}, "contradict each other"),
        (({"kl": {"coefficient": 0.1}}, {}), {}, "of an environment's own kl, too"),
        (({"reward_weight": 0}, {}), {}, "no function has a weight in the environment 'e0'"),
        ((), {"placement": "loss", "coefficient": 1, "until": 0}, "until"),
    ],
)
def test_contradictions_are_refused(
    environments: tuple[dict[str, Any], ...], kl: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(*environments, **kl)


def test_a_gate_is_played_in_every_evaluation() -> None:
    base = config().model_dump(mode="json")
    suite = {**GAME, "label": "first", "gate": True}
    gated = parse_config({**base, "evaluation": {"every": 1, "suites": [suite]}})
    assert gated.gates == ("first",)
    with pytest.raises(ConfigError, match="is a gate and is left out of evaluations"):
        parse_config({**base, "evaluation": {"every": 1, "suites": [{**suite, "every": 2}]}})
    with pytest.raises(ConfigError, match=r"is a gate, and evaluation\.every is 0, so no check"):
        parse_config({**base, "evaluation": {"suites": [suite]}})

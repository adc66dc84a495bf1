"""A critic in a run file: what it needs, and what it cannot stand beside."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.config.stage_keys import stage_settings
from earl_core.run.model_card import model_card
from flows.cli.debugging import prompts_for_debugging
from tests.config.test_stage_keys import BASE, RUNS

GAE: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {}}


def test_its_settings_are_the_updates_but_for_its_own() -> None:
    config = parse_config(BASE | GAE | {"update": {"epochs": 3, "beta1": 0.5, "minibatches": 2}})
    assert config.critic is not None
    settings = config.critic.settings(config.update)
    own = {"learning_rate": config.critic.learning_rate}
    assert settings == config.update.model_copy(update=own)
    config = parse_config(BASE | GAE | {"critic": {"epochs": 4, "minibatches": 8}})
    assert config.critic is not None
    settings = config.critic.settings(config.update)
    assert (settings.epochs, settings.minibatches) == (4, 8)


def test_what_freezes_its_routers_is_in_its_key() -> None:
    model = {"model": {**BASE["model"], "freeze_routers": True}}
    plain, frozen = (parse_config(BASE | GAE | more) for more in ({}, model))
    assert stage_settings(plain, "critic") != stage_settings(frozen, "critic")
    assert stage_settings(plain, "value") == stage_settings(frozen, "value")


def test_a_debugged_iteration_has_a_prompt_for_each_of_its_minibatches() -> None:
    assert prompts_for_debugging(parse_config(BASE | GAE)) == 2
    assert prompts_for_debugging(parse_config(BASE | GAE | {"critic": {"minibatches": 7}})) == 7


def test_a_model_card_says_how_long_the_critic_was_trained_alone() -> None:
    config = parse_config(BASE | GAE | {"critic": {"warmup_iterations": 2}})
    assert "by 3 iterations of 5" in (card := model_card(config, 3, "the last one", [], []))
    assert "the first 2 of a critic alone" in card
    assert "critic alone" not in model_card(parse_config(BASE | GAE), 3, "the last one", [], [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"critic": None}, "the stage `value` writes only in a run with a critic: add the section"),
        ({"algorithm": {}}, "advantage 'grpo' asks no critic: leave critic out"),
        ({"critic": {"warmup_iterations": 5}}, "leaves none of the 5 iterations to train"),
        ({"critic": {"minibatches": 9}}, "critic.minibatches .9. exceeds"),
        ({"critic": {"clip": 0.0}}, "critic.clip"),
        ({"model": {"path": "/m", "adapter": {"rank": 8}}}, "not supported beside model.adapter"),
        (RUNS["imitation"], "imitate in a run of its own"),
    ],
)
def test_what_it_cannot_be_is_said_in_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(BASE | GAE | given)

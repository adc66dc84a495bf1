"""What `earl doctor` and a start say of the routers of a mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.control.routing_checks import check_routing
from earl_core.pretrained.model_directory import read_model_shape
from flows.cli.checks.configuration import model as of_model
from tests.cli.conftest import CONFIG
from tests.cli.test_model_files import SHAPE, write_model

FILES = ("model.safetensors", "tokenizer.json")


def configured(directory: Path, kind: str, experts: int, *overrides: str) -> RunConfig:
    """A run of a model that is of this type by its files."""
    write_model(directory, FILES)
    shape = {**SHAPE, "model_type": kind, "num_local_experts": experts, "num_experts_per_tok": 2}
    (directory / "config.json").write_text(json.dumps(shape))
    return load_config(CONFIG, [f"model.path={directory}", *overrides])


def said(config: RunConfig) -> list[str]:
    """The findings of `earl doctor` beside those that are good."""
    return [each.text for each in of_model(config) if each.level != "good"]


@pytest.mark.parametrize(
    ("kind", "experts", "overrides", "words"),
    [
        ("phimoe", 4, (), "phimoe model, whose routers choose .* set rollout.record_routing=off"),
        ("gemma4_text", 4, (), "gemma4_text model, whose routers .* rollout.record_routing=off"),
        ("llama", 0, ("model.freeze_routers=true",), "freeze_routers is true, but .* no experts"),
        ("llama", 0, ("algorithm.router_aux_loss_coef=0.1",), "coef is not 0, but .* no experts"),
    ],
    ids=("untold", "untold, too", "nothing to keep", "nothing to balance"),
)  # fmt: skip
def test_what_routers_cannot_do_is_refused(
    tmp_path: Path, kind: str, experts: int, overrides: tuple[str, ...], words: str
) -> None:
    config = configured(tmp_path / "model", kind, experts, *overrides)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        said(config)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_routing(config, read_model_shape(tmp_path / "model"))


def test_other_experts_than_were_played_are_a_warning(tmp_path: Path) -> None:
    off, half = "rollout.record_routing=off", "rollout.dtype=bfloat16"
    (told,) = said(configured(tmp_path / "a", "phimoe", 4, off, half))
    assert "rollout.record_routing is off: the trainer's routers choose anew" in told
    assert "about a tenth" in told
    assert said(configured(tmp_path / "b", "phimoe", 4, off)) == []
    assert said(configured(tmp_path / "c", "mixtral", 4, half)) == []
    assert said(configured(tmp_path / "d", "llama", 0, half)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.record_routing=off",), "record_routing is `off`: set it to `auto`"),
        (("model.freeze_routers=true",), "trains routers, which model.freeze_routers keeps"),
        (("update.zero_advantage=skip",), "is `skip`, but algorithm.router_aux_loss_coef is not 0"),
    ],
)
def test_a_balance_that_has_nothing_to_count_or_train_is_refused(
    overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(CONFIG, ["algorithm.router_aux_loss_coef=0.1", *overrides])

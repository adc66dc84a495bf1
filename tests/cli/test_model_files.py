"""Model directories that lack something: refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.pretrained.architecture import check_code
from flows.cli.checks.configuration import check_configuration
from flows.cli.training import preflight
from tests.cli.conftest import CONFIG

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
INDEX = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}

CONTENTS = {".safetensors": (2).to_bytes(8, "little") + b"{}"}
"""Of no tensors."""


def write_model(model: Path, files: tuple[str, ...], **settings: Any) -> None:
    """A directory of a model's shape with these files."""
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE | settings))
    for name in files:
        (model / name).write_bytes(CONTENTS.get(Path(name).suffix, b"x"))
        if name.endswith("index.json"):
            (model / name).write_text(json.dumps(INDEX))


def configured(model: Path, files: tuple[str, ...], engine: str = "torch") -> RunConfig:
    write_model(model, files)
    overrides = [f"model.path={model}", f"rollout.engine={engine}"]
    return load_config(CONFIG, [*overrides, f"runs_directory={model.parent}"])


OWN_CODE = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}


@pytest.mark.parametrize(
    ("settings", "override", "words"),
    [
        ({"layer_types": ["conv"]}, "seed=1", "layers of type conv, which neither"),
        ({"layers_block_type": ["attention", "mamba"]}, "seed=1", "layers of type mamba, which"),
        ({"layer_types": ["linear_attention"]}, "seed=1", "layers of type linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "seed=1", "layers of type chunked_attention"),
        ({"index_topk": 4}, "seed=1", "layers of type indexed_attention"),
        ({"model_type": "phimoe", "sliding_window": 9}, "seed=1", "sliding window of 9 tokens"),
        ({"model_type": "nemotron"}, "seed=1", "nemotron models cannot be trained on packed"),
        ({"model_type": "opt"}, "rollout.engine=torch", "set rollout.engine=vllm"),
        ({"model_type": "mine"}, "seed=1", "knows no models of type 'mine'"),
        (OWN_CODE, "seed=1", "set model.trust_remote_code to true"),
        ({"tie_word_embeddings": False, "model_type": "gemma2"}, "rollout.engine=vllm",
         "has an output layer of its own"),
        ({"head_dim": 40}, "rollout.engine=vllm", "this llama model has heads of 40"),
        ({}, "rollout.max_model_len=65", "max_model_len 65 exceeds the model's 64 positions"),
    ],
)  # fmt: skip
def test_what_workers_would_refuse_of_a_model_is_refused_by_train_and_doctor(
    tmp_path: Path, settings: dict[str, Any], override: str, words: str
) -> None:
    write_model(tmp_path / "model", ("model.safetensors", "tokenizer.model"), **settings)
    place = [f"model.path={tmp_path / 'model'}", f"runs_directory={tmp_path}"]
    config = load_config(CONFIG, [*place, override])
    with pytest.raises(ConfigError, match=words):
        preflight(config, tmp_path / "run")
    told = [each.text for each in check_configuration(config) if each.level == "blocks"]
    assert any(words in text for text in told)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_types": ["conv"]}, "layers of type conv"),
        ({"model_type": "nemotron"}, "nemotron models cannot be trained"),
        (OWN_CODE, "brings Python code of its own"),
    ],
)
def test_a_reference_that_workers_would_refuse_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    files = ("model.safetensors", "tokenizer.model")
    write_model(tmp_path / "model", files)
    write_model(tmp_path / "teacher", files, **settings)
    kl = f"algorithm.kl={{placement: loss, coefficient: 0.1, reference: '{tmp_path / 'teacher'}'}}"
    place = [f"model.path={tmp_path / 'model'}", f"runs_directory={tmp_path}"]
    with pytest.raises(ConfigError, match=words):
        preflight(load_config(CONFIG, [*place, kl]), tmp_path / "run")


def test_an_adapter_wants_weights_that_can_be_read_in_parts(tmp_path: Path) -> None:
    write_model(tmp_path / "model", ("pytorch_model.bin", "tokenizer.model"))
    place = [f"model.path={tmp_path / 'model'}", f"runs_directory={tmp_path}"]
    preflight(load_config(CONFIG, place), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no safetensors weights"):
        preflight(load_config(CONFIG, [*place, "model.adapter.rank=2"]), tmp_path / "run")


def test_layers_that_attend_have_two_names(tmp_path: Path) -> None:
    files = ("model.safetensors", "tokenizer.model")
    write_model(tmp_path / "model", files, layer_types=["attention", "sliding_attention"])
    preflight(load_config(CONFIG, [f"model.path={tmp_path / 'model'}"]), tmp_path / "run")


def test_code_that_is_trusted_or_not_needed_is_no_obstacle(tmp_path: Path) -> None:
    for number, (settings, trusted) in enumerate(
        [(OWN_CODE, True), (OWN_CODE | {"model_type": "llama"}, False)]
    ):
        write_model(tmp_path / str(number), ("model.safetensors", "tokenizer.model"), **settings)
        check_code(tmp_path / str(number), trusted)


@pytest.mark.parametrize(
    ("files", "engine", "words"),
    [
        (("tokenizer.json",), "torch", "has no weights"),
        (("model.safetensors", "chat_template.jinja"), "torch", "has no tokenizer"),
        (("pytorch_model.bin", "tokenizer.json"), "vllm", "rollout.engine=torch"),
        (
            ("one.safetensors", "model.safetensors.index.json", "tokenizer.json"),
            "torch",
            "such as two.safetensors",
        ),
    ],
)
def test_what_is_missing_is_named_by_train_and_doctor(
    tmp_path: Path, files: tuple[str, ...], engine: str, words: str
) -> None:
    config = configured(tmp_path / "model", files, engine)
    with pytest.raises(ConfigError, match=words):
        preflight(config, tmp_path / "run")
    blocking = [f for f in check_configuration(config) if f.level == "blocks"]
    assert len(blocking) == 1
    assert words in f"{blocking[0].text}: {blocking[0].advice}"


@pytest.mark.parametrize("vocab", ["words", "pieces"])
def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path, vocab: str) -> None:
    config = configured(tmp_path / "model", ("model.safetensors", "tokenizer.json"))
    words = [f"w{number}" for number in range(64)]

    def write(named: list[str], special: bool) -> None:
        found: object = [[each, 0.0] for each in named]
        if vocab == "words":
            found = {each: number for number, each in enumerate(named)}
        added = [{"id": len(named), "content": "<image>", "special": special}]
        raw = {"model": {"vocab": found}, "added_tokens": added}
        (tmp_path / "model/tokenizer.json").write_text(json.dumps(raw))

    write(words[:-1], special=False)  # as many as there are rows
    preflight(config, tmp_path / "run")
    write(words, special=True)  # one more, that no text makes
    preflight(config, tmp_path / "run")
    for more, lost in (
        (words, "'<image>' (64)"),
        ([*words, "more"], "'more' (64), '<image>' (65)"),
    ):
        write(more, special=False)
        with pytest.raises(ConfigError) as refusal:
            preflight(config, tmp_path / "run")
        assert f"its vocab_size is 64): {lost}" in str(refusal.value)
        assert "resize_token_embeddings" in str(refusal.value)


@pytest.mark.parametrize(
    ("files", "engine"),
    [
        (("model.safetensors", "tokenizer.json"), "vllm"),
        (("model-00001-of-00002.safetensors", "tokenizer.model"), "torch"),
        (("pytorch_model-00001-of-00002.bin", "vocab.json", "merges.txt"), "torch"),
    ],
)
def test_what_is_there_is_enough(tmp_path: Path, files: tuple[str, ...], engine: str) -> None:
    config = configured(tmp_path / "model", files, engine)
    preflight(config, tmp_path / "run")
    assert [f for f in check_configuration(config) if f.level == "blocks"] == []


@pytest.mark.parametrize(
    "override",
    [
        "reward.functions=[{function: 'nowhere.at:all'}]",
        "evaluation.suites=[{label: held, name: 'nowhere.at:All'}]",
    ],
)
def test_code_that_is_nowhere_is_refused_before_anything_starts(
    tmp_path: Path, override: str
) -> None:
    files = ("model.safetensors", "tokenizer.json")
    model = configured(tmp_path / "model", files, "torch").model.path
    overrides = [f"model.path={model}", f"runs_directory={tmp_path}", override]
    with pytest.raises(ConfigError, match="nowhere"):
        preflight(load_config(CONFIG, overrides), tmp_path / "run")

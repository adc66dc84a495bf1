"""Output layers that the files, or two configurations, disagree about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from earl_core.config import ConfigError
from earl_core.weights.tied import check_tied
from tests.learner.helpers import save_model
from tests.learner.test_policy_learner import make_learner

HEAD = "lm_head.weight"


def changed(kind: str, directory: Path, head: str, **config: Any) -> Path:
    """A model whose files have a head: none, one that is equal to the embeddings, or another."""
    save_model(kind, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    (name,) = (n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
    tensors.pop(HEAD, None)
    if head:
        tensors[HEAD] = tensors[name].clone() + (0.1 if head == "other" else 0.0)
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | config))
    return directory


@pytest.mark.parametrize(
    ("kind", "head", "config", "why"),
    [
        ("qwen2", "", {}, ""),
        ("qwen2", "equal", {}, ""),
        ("qwen2", "other", {"tie_word_embeddings": False}, ""),
        ("qwen2", "other", {}, "model.embed_tokens.weight and lm_head.weight.*different values: "),
        ("gpt2", "other", {}, "different values: set tie_word_embeddings to false in its config"),
        ("llama", "other", {"tie_word_embeddings": True}, "or remove lm_head.weight from"),
        (
            "qwen2", "", {"text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings true and text_config.tie_word_embeddings false.*give them one",
        ),
        (
            "llama", "other", {"language_config": {"tie_word_embeddings": True}},
            "tie_word_embeddings false and language_config.tie_word_embeddings true",
        ),
        ("qwen2", "", {"vision_config": {"tie_word_embeddings": False}}, ""),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    kind: str, head: str, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    directory = changed(kind, tmp_path / "model", head, **config)
    if not why:
        check_tied(directory)
        return
    with pytest.raises(ConfigError, match=why):
        check_tied(directory)


def test_a_learner_is_given_no_head_that_nobody_has_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different values"):
        make_learner(changed("qwen2", tmp_path / "tied", "other"))
    untied = changed("qwen2", tmp_path / "untied", "", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight \(1 in all\) of Qwen2ForCausalLM"):
        make_learner(untied)
    kept = make_learner(changed("qwen2", tmp_path / "both", "other", tie_word_embeddings=False))
    weights = kept.named_weights()
    difference = weights[HEAD] - weights["model.embed_tokens.weight"]
    torch.testing.assert_close(difference, torch.full_like(difference, 0.1))

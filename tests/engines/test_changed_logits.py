"""Families with scaled logits, soft caps, sinks, windows: engines answer as transformers does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from earl_core.weights.publish import publish
from tests.engines.driver import Driver
from tests.engines.models import POSITIONS, VOCABULARY, model_logprobs, prompt_of
from tests.engines.starting import start

_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2},
    "Cohere2": {**_WINDOWS, "logit_scale": 0.25},
    # Small enough to bend what they cap.
    "Gemma2": {**_WINDOWS, "head_dim": 32, "query_pre_attn_scalar": 32,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "GptOss": {**_WINDOWS, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip
VLLM = [pytest.mark.slow, pytest.mark.campaign]


def make(family: str, directory: Path, seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **FAMILIES[family]})
    model: transformers.PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1 or "sinks" in name:
                tensor.normal_(0, 1.0 if "sinks" in name else 0.15)
    model.eval().save_pretrained(directory)
    # transformers' `sdpa` leaves soft caps out.
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="rpc") as directory:
        yield Path(directory)


def worst(driver: Driver, model: transformers.PreTrainedModel) -> float:
    """The largest difference of log-probs from a plain forward pass."""
    apart = []
    for seed in range(3):
        prompt = prompt_of(seed, 20 + seed)
        answer = driver.answer(prompt)
        expected = model_logprobs(model, prompt, answer.tokens, 0.7)
        apart.append(np.abs(np.subtract(answer.logprobs, expected)).max())
    return float(max(apart))


@pytest.mark.parametrize(
    ("engine", "family"),
    [
        *(("torch", family) for family in FAMILIES),
        *(pytest.param("vllm", name, marks=VLLM) for name in ("Granite", "Cohere2", "Gemma2")),
    ],
)
def test_engines_answer_as_transformers_before_and_after_new_weights(
    engine: str, family: str, tmp_path: Path, scratch: Path
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    old, new = (make(family, tmp_path / name, seed) for name, seed in (("old", 0), ("new", 5)))
    driver = start(engine, tmp_path / "old", scratch)
    try:
        assert worst(driver, old) < 3e-5
        published = publish(dict(new.named_parameters()), tmp_path / "published", 3, "float32")
        driver.run(driver.engine.play_under(published))
        assert worst(driver, new) < 3e-5 < worst(driver, old)
    finally:
        driver.close()

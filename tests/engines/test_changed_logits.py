"""Families with scaled logits, soft caps, sinks, windows: engines answer as transformers does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from earl_core.weights.publish import publish
from tests.engines.driver import Driver
from tests.engines.models import POSITIONS, VOCABULARY, model_logprobs, prompt_of
from tests.engines.starting import start
from tests.families.registry import build

FAMILIES = ("Granite", "Cohere2", "Gemma2", "GptOss")
VLLM = [pytest.mark.slow, pytest.mark.campaign]


def make(family: str, directory: Path, seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose distributions are far from uniform."""
    model = build(family, seed, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS)
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

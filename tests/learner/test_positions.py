"""Rotary factors that transformers chooses by the longest position: pinned by the model's limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earl_core.config import ConfigError
from earl_core.learner import loading
from tests.engines.starting import ENGINES, start
from tests.families.registry import build
from tests.learner.helpers import eager_model, plain_logprobs, random_samples, save_model
from tests.learner.test_policy_learner import TEMPERATURE, make_learner

ORIGINAL = 64


def _long_rope(limit: int = 512) -> dict[str, Any]:
    """Factors for heads of 32, as far apart as those of Phi-3 128k."""
    return {
        "sliding_window": None,
        "max_position_embeddings": limit,
        "original_max_position_embeddings": ORIGINAL,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": list(np.linspace(1.0, 1.5, 16)),
            "long_factor": list(np.linspace(1.2, 30.0, 16)),
        },
    }


def _pinned_copy(directory: Path, target: Path, kind: str) -> Path:
    """The same weights with both factors alike, for plain transformers."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    rope = config.get("rope_parameters") or config["rope_scaling"]
    rope["short_factor"] = rope["long_factor"] = rope[f"{kind}_factor"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose limit exceeds its original one, and its copy with the long factors alone."""
    root = tmp_path_factory.mktemp("phi3")
    directory = save_model(build("Phi3", **_long_rope()), root / "model")
    return directory, _pinned_copy(directory, root / "pinned", "long")


def test_log_probs_do_not_depend_on_what_a_sample_is_packed_with(phi3: tuple[Path, Path]) -> None:
    directory, pinned = phi3
    few = random_samples(4, seed=5, longest=40)
    samples = few + random_samples(2, seed=6, longest=300)
    assert max(len(sample.tokens) for sample in samples) > ORIGINAL
    learner = make_learner(directory, max_tokens_per_microbatch=2048)
    plain = eager_model(pinned)
    # With long ones in the same forward pass, and without.
    for packed in (samples, few):
        for sample, found in zip(packed, learner.score(packed), strict=True):
            expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
            np.testing.assert_allclose(found[sample.loss_mask == 1], expected.detach(), atol=3e-5)
    # The factors matter: those of transformers' own choice are another model's.
    short = few[0]
    chosen, _ = plain_logprobs(eager_model(directory), short, TEMPERATURE)
    pinned_too, _ = plain_logprobs(plain, short, TEMPERATURE)
    assert float((chosen - pinned_too).abs().max()) > 0.1


def test_a_limit_within_the_original_one_takes_the_short_factors(tmp_path: Path) -> None:
    directory = save_model(build("Phi3", **_long_rope(ORIGINAL)), tmp_path / "model")
    plain = eager_model(_pinned_copy(directory, tmp_path / "pinned", "short"))
    samples = random_samples(3, seed=5, longest=40)
    for sample, found in zip(samples, make_learner(directory).score(samples), strict=True):
        expected, _ = plain_logprobs(plain, sample, TEMPERATURE)
        np.testing.assert_allclose(found[sample.loss_mask == 1], expected.detach(), atol=3e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_take_the_same_factors_whatever_their_own_limit(
    kind: str, phi3: tuple[Path, Path], tmp_path: Path
) -> None:
    """vLLM chooses by the length it is built for; here that is below the original limit."""
    from tests.engines.driver import request
    from tests.engines.models import reference_logprobs

    directory, pinned = phi3
    driver = start(kind, directory, tmp_path / "rpc", max_model_len=ORIGINAL)
    try:
        prompts = [list(range(3, 3 + length)) for length in (5, 30)]
        answers = driver.generate([request(n, prompt) for n, prompt in enumerate(prompts)])
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = reference_logprobs(pinned, prompt, answer.tokens, 0.7)
            np.testing.assert_allclose(answer.logprobs, expected, atol=2e-4)
    finally:
        driver.close()


def test_factors_that_nobody_pins_are_refused(
    phi3: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a model that brings its own code."""
    from transformers import AutoConfig

    monkeypatch.setattr(
        loading, "model_config", lambda path, trust: AutoConfig.from_pretrained(path)
    )
    with pytest.raises(ConfigError, match="chooses its position factors by the longest sample"):
        make_learner(phi3[0])


def test_dynamic_scaling_is_off_up_to_the_models_limit(tmp_path: Path) -> None:
    """As in transformers, where vLLM would stretch the base for all lengths."""
    from earl_core.pretrained.architecture import model_config

    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    directory = save_model(build("Llama", rope_parameters=scaling), tmp_path)
    pinned: Any = model_config(directory)
    assert pinned.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    sample = random_samples(1, seed=6, longest=300)[0]
    expected, _ = plain_logprobs(eager_model(directory), sample, TEMPERATURE)
    (found,) = make_learner(directory).score([sample])
    np.testing.assert_allclose(found[sample.loss_mask == 1], expected.detach(), atol=3e-5)

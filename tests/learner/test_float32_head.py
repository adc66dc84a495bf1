"""`model.float32_head`: logits in float32 where all else is bf16, in trainer and engines."""

from __future__ import annotations

from pathlib import Path

import torch

from earl_core.config.model import ModelConfig
from earl_core.learner.data.packing import pack
from earl_core.learner.lm_head import decoder_of
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.pretrained.architecture import model_config
from earl_core.pretrained.float32_head import Float32Head
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.engines.vllm_environment import overrides
from earl_core.weights.publish import publish
from tests.engines.driver import Driver
from tests.engines.models import make
from tests.learner.helpers import random_samples, save_model


def test_only_the_head_is_in_float32_and_gradients_flow(tmp_path: Path) -> None:
    model = load_policy(
        ModelConfig(path=str(save_model("llama", tmp_path))), create_mesh()
    ).model.bfloat16()
    packed = PackedTensors.from_microbatch(pack(random_samples(4, masked=False), range(4)))
    found, _ = logprobs_of_trained(model, packed, temperature=0.8, float32_head=True)
    chunked, _ = logprobs_of_trained(
        model, packed, temperature=0.8, float32_head=True, chunk_tokens=5
    )
    rough, _ = logprobs_of_trained(model, packed, temperature=0.8)
    hidden = decoder_of(model)(
        input_ids=packed.tokens[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        sample_boundaries=packed.boundaries,
    )[0][0][packed.predictors]
    weight = model.lm_head.weight.float()
    logits = hidden.float() @ weight.T / 0.8
    expected = logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunked, expected, atol=1e-5, rtol=1e-5)
    assert float((rough - expected).abs().mean()) > 1e-4
    chunked.sum().backward()  # type: ignore[no-untyped-call]
    gradient = model.lm_head.weight.grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


def test_the_float32_head_multiplies_in_float32(tmp_path: Path) -> None:
    model = make("llama_untied", tmp_path).bfloat16()
    hidden = torch.randn(5, model.lm_head.weight.shape[1]).bfloat16()
    exact = hidden.double() @ model.lm_head.weight.double().T
    fine, rough = Float32Head(model.lm_head)(hidden), model.lm_head(hidden)
    assert fine.dtype == torch.float32
    torch.testing.assert_close(fine.double(), exact, atol=1e-5, rtol=1e-5)
    assert float((rough.double() - exact).abs().max()) > 1e-3


def _engine(directory: Path) -> Driver:
    engine = TorchEngine(directory, dtype="bfloat16", float32_head=True)
    driver = Driver(engine, directory)
    driver.run(engine.start())
    return driver


def test_new_weights_reach_the_engines_copy(tmp_path: Path) -> None:
    make("llama_untied", tmp_path)
    new = make("llama_untied", tmp_path / "new", seed=9)
    updated, fresh = _engine(tmp_path), _engine(tmp_path / "new")
    try:
        manifest = publish(new.state_dict(), tmp_path / "published", 1, "bfloat16")
        updated.run(updated.engine.play_under(manifest))
        found, expected = (driver.answer([3, 4, 5]) for driver in (updated, fresh))
    finally:
        updated.close()
        fresh.close()
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_vllm_is_told(tmp_path: Path) -> None:
    config = model_config(save_model("llama", tmp_path))
    assert getattr(overrides(config, float32_head=False), "head_dtype", None) is None
    assert overrides(config, float32_head=True).head_dtype == "float32"

"""Mixtures of experts on vLLM: new experts are the ones that answer, or the engine says which are
not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

from earl_core.pretrained.routers import routers_of
from earl_core.rollout.engines import vllm_environment, vllm_experts
from earl_core.rollout.errors import WeightSyncError
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.publish import publish
from earl_core.weights.renamed import publish_renamed
from tests.engines.driver import Driver
from tests.engines.models import POSITIONS, VOCABULARY, model_logprobs, prompt_of, read
from tests.engines.stale_experts import EXPERT, LAYER, STALE_VERSION
from tests.engines.starting import start
from tests.families.registry import build

pytest.importorskip("vllm")

EXACT = 3e-5
"""Nats. Rounding alone: these logits are large."""


def make(family: str, directory: Path, seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose routers choose clearly and whose experts differ."""
    more = {"max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    model = build(family, seed, vocab_size=VOCABULARY, **more)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.normal_(0, 0.15)
        torch.manual_seed(0)  # no version changes what nobody trains
        for name, tensor in model.named_buffers():
            if "correction" in name:
                tensor.normal_(0, 0.15)
    model.eval().save_pretrained(directory)
    return model


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="rpc") as directory:
        yield Path(directory)


def chosen_experts(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """What the routers of a plain model choose, [tokens, layers, chosen], each choice ascending."""
    routers = routers_of(model)
    assert routers is not None
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return np.sort(routers.live().numpy())


def worst(driver: Driver, model: transformers.PreTrainedModel) -> float:
    """The largest difference of log-probs from a plain forward pass, whose experts are those that
    the answers name where the log-probs are equal."""
    apart = []
    for seed in range(4):
        # From the third on, some blocks of the prompt are cached.
        prompt = prompt_of(seed % 2, 70 + seed)
        answer = driver.answer(prompt)
        expected = model_logprobs(model, prompt, answer.tokens, 0.7)
        apart.append(np.abs(np.subtract(answer.logprobs, expected)).max())
        if apart[-1] < EXACT:
            assert answer.routing is not None
            np.testing.assert_array_equal(
                np.sort(answer.routing.reshape(len(answer.routing), -1, 2)),
                chosen_experts(model, [*prompt, *answer.tokens][:-1]),
            )
    return float(max(apart))


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        pytest.param("Qwen3Moe", {}, marks=pytest.mark.slow),
        *(
            pytest.param(family, parallel, marks=pytest.mark.campaign)
            for family, parallel in [
                ("Mixtral", {}), ("Olmoe", {}), ("Glm4Moe", {}),
                ("Qwen3Moe", {"tensor_parallel": 2}),
            ]
        ),
    ],
)  # fmt: skip
def test_new_experts_answer_and_one_that_stayed_is_named(
    family: str,
    parallel: dict[str, Any],
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There and back."""

    def arguments(*given: Any) -> dict[str, Any]:
        found = made(*given)
        return {**found, "worker_extension_cls": "tests.engines.stale_experts.StaleExpert"}

    made = vllm_environment.engine_arguments
    monkeypatch.setattr(vllm_environment, "engine_arguments", arguments)
    make(family, tmp_path / "old", 0)
    new, newest = (make(family, tmp_path / name, seed) for name, seed in (("new", 5), ("next", 7)))
    driver = start("vllm", tmp_path / "old", scratch, record_routing=True, **parallel)
    try:
        assert worst(driver, read(tmp_path / "old")) < EXACT
        published = publish(dict(new.named_parameters()), tmp_path / "published", 3, "float32")
        driver.run(driver.engine.play_under(published))
        assert worst(driver, new) < EXACT < worst(driver, read(tmp_path / "old"))
        files = manifest_from_directory(tmp_path / "old", 4)
        back = publish_renamed(files, tmp_path / "old", tmp_path / "back")
        driver.run(driver.engine.play_under(back))
        assert worst(driver, read(tmp_path / "old")) < EXACT
        stale = publish(
            dict(newest.named_parameters()), tmp_path / "more", STALE_VERSION, "float32"
        )
        named = rf"expert {EXPERT} of model\.layers\.{LAYER}\..* computes with other weights"
        with pytest.raises(WeightSyncError, match=named):
            driver.run(driver.engine.play_under(stale))
    finally:
        driver.close()


def test_an_expert_as_it_was_before_an_update_is_named() -> None:
    """The update is so small that no product would show it."""
    gate_up, down = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    layer = SimpleNamespace(
        layer_name="model.layers.0.mlp.experts",
        global_num_experts=3,
        is_fused_checkpoint_transposed=False,
        moe_config=SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=1, tp_rank=0)),
        _map_global_expert_id_to_local_expert_id=lambda expert: expert,
        w13_weight=gate_up.clone(),
        w2_weight=down.clone(),
    )
    down[1, 2, 3] *= 1 + 1e-5
    named = r"expert 1 of model\.layers\.0\.mlp\.experts has other weights than were published"
    layers = patch.object(vllm_experts, "routed_layers", lambda _: {0: layer})
    weights = {
        "model.layers.0.mlp.experts.gate_up_proj": gate_up,
        "model.layers.0.mlp.experts.down_proj": down,
    }
    with layers, pytest.raises(RuntimeError, match=named):
        vllm_experts.renew_experts(torch.nn.Module(), weights)

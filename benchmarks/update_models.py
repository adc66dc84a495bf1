"""Random models that `benchmarks.update` trains beside the configured one, and their routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from earl_core.learner.data.packing import TrainingSample, pack
from earl_core.learner.model import PackedTensors
from earl_core.pretrained.routers import routers_of
from earl_core.trajectory.routing import RecordedRouting, RoutingShape
from tools.shapes import save_tokenizer

if TYPE_CHECKING:
    from earl_core.learner.policy_learner import PolicyLearner

MOE, HYBRID = "moe", "hybrid"
_VOCABULARY = 49152
"""SmolLM2's, in whose tokens episodes are recorded."""
_CONFIGS: dict[str, dict[str, Any]] = {
    MOE: {
        "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    HYBRID: {
        "model_type": "qwen3_5_text", "hidden_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 768, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 4,
    },
}  # fmt: skip


def save_model(name: str, directory: Path) -> str:
    """Write a random float32 model; returns what it is, for people."""
    given = {**_CONFIGS[name]}
    config = AutoConfig.for_model(
        given.pop("model_type"),
        vocab_size=_VOCABULARY,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **given,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    parameters = sum(each.numel() for each in model.parameters()) / 1e6
    sizes = ", ".join(f"{key} {value}" for key, value in given.items())
    return f"a random {config.model_type} of {parameters:.0f} M parameters ({sizes})"


@torch.no_grad()
def routed(samples: Sequence[TrainingSample], learner: PolicyLearner) -> list[TrainingSample]:
    """Give samples the experts that a rollout of the learner's own model would have recorded: for
    one beginning the same."""
    routers = routers_of(learner.model)
    assert routers is not None
    shape, made = routers.shape, list[np.ndarray]()
    for sample in samples:
        packed = PackedTensors.from_microbatch(pack([sample], [0]), learner.device)
        with learner.parallel.passes():
            learner.parallel.module(packed, 1.0, "none")
        rows = routers.live().view(-1, shape.width).cpu().numpy().astype(shape.dtype)
        routers.forget()
        for other, earlier in zip(samples, made, strict=False):
            least = min(len(rows), len(earlier))
            same = np.cumprod(sample.tokens[:least] == other.tokens[:least]).sum()
            rows[:same] = earlier[:same]
        made.append(rows)
    return [recorded(*pair, shape) for pair in zip(samples, made, strict=True)]


def recorded(sample: TrainingSample, rows: np.ndarray, shape: RoutingShape) -> TrainingSample:
    """The sample with these experts of its tokens, [tokens, width]."""
    whose = f"sample {sample.sample_id}"
    routing = RecordedRouting(shape, rows, len(rows), whose, shape.hashes(rows))
    return replace(sample, routing=routing)

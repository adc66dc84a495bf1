"""Well-known model shapes."""

from __future__ import annotations

import re
from typing import Any

from earl_core.deployment.layer_shapes import StateShape
from earl_core.deployment.shapes import ModelShape


def _family(
    kind: str, vocabulary: int, positions: int, *, tied: bool = False, head_dim: int = 0
) -> ModelShape:
    """A shape with the numbers that a family's models share; its sizes are those of none."""
    return ModelShape(
        model_type=kind,
        hidden_size=1,
        layers=1,
        attention_heads=1,
        key_value_heads=1,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_positions=positions,
        tied_embeddings=tied,
    )


def _sized(
    family: ModelShape, hidden: int, layers: int, heads: int, key_value: int, feed_forward: int
) -> ModelShape:
    sizes = {
        "hidden_size": hidden,
        "layers": layers,
        "attention_heads": heads,
        "key_value_heads": key_value,
        "intermediate_size": feed_forward,
    }
    return ModelShape(**family.model_dump() | sizes)


def _hybrid(kind: str, hidden: int, layers: int, key_value: int, **more: Any) -> ModelShape:
    """A Qwen3.5, of which each fourth layer has attention and the others have a state."""
    states = StateShape(
        layers=layers - layers // 4,
        key_heads=16,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        window=4,
    )
    family = _family(kind, 248320, 262144, head_dim=256)
    sized = _sized(family, hidden, layers, 16, key_value, more.pop("intermediate_size", 0))
    counted = {"gated_attention": True, "query_key_norms": True, "attention_extras": 512}
    return ModelShape(**sized.model_dump() | counted | more | {"states": states})


def _mixture(
    dense: ModelShape, experts: int, per_token: int, width: int, **more: Any
) -> ModelShape:
    """A shape whose layers have routers."""
    sizes = {"experts": experts, "experts_per_token": per_token, "expert_size": width}
    return ModelShape(**dense.model_dump() | sizes | more)


_QWEN3 = _family("qwen3", 151936, 40960, head_dim=128)
_QWEN3_TIED = _family("qwen3", 151936, 40960, head_dim=128, tied=True)
_QWEN2 = _family("qwen2", 152064, 131072)
_LLAMA = _family("llama", 128256, 131072)
_LLAMA_TIED = _family("llama", 128256, 131072, tied=True)
_SMOLLM2 = _family("llama", 49152, 8192, tied=True)
_MISTRAL = _family("mistral", 131072, 131072, head_dim=128)

MODELS: dict[str, ModelShape] = {
    "qwen3-0.6b": _sized(_QWEN3_TIED, 1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _sized(_QWEN3_TIED, 2048, 28, 16, 8, 6144),
    "qwen3-4b": _sized(_QWEN3_TIED, 2560, 36, 32, 8, 9728),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 8, 12288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 8, 17408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 8, 25600),
    "qwen2.5-0.5b": _sized(_family("qwen2", 151936, 32768, tied=True), 896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _sized(_family("qwen2", 151936, 131072, tied=True), 1536, 28, 12, 2, 8960),
    "qwen2.5-3b": _sized(_family("qwen2", 151936, 32768, tied=True), 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _sized(_QWEN2, 5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _sized(_QWEN2, 8192, 80, 64, 8, 29568),
    "llama-3.2-1b": _sized(_LLAMA_TIED, 2048, 16, 32, 8, 8192),
    "llama-3.2-3b": _sized(_LLAMA_TIED, 3072, 28, 24, 8, 8192),
    "llama-3.1-8b": _sized(_LLAMA, 4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _sized(_LLAMA, 8192, 80, 64, 8, 28672),
    "llama-3.3-70b": _sized(_LLAMA, 8192, 80, 64, 8, 28672),
    "qwen3-30b-a3b": _mixture(
        _sized(_family("qwen3_moe", 151936, 40960, head_dim=128), 2048, 48, 32, 4, 6144),
        128,
        8,
        768,
        query_key_norms=True,
        attention_extras=2 * 128,
    ),
    "qwen3.5-9b": _hybrid("qwen3_5", 4096, 32, 4, intermediate_size=12288),
    "qwen3.5-35b-a3b": _mixture(
        _hybrid("qwen3_5_moe", 2048, 40, 2, intermediate_size=512),
        256,
        8,
        512,
        shared_expert_size=512,
        shared_expert_gate=True,
    ),
    "glm-4.5-air": _mixture(
        _sized(_family("glm4_moe", 151552, 131072, head_dim=128), 4096, 46, 96, 8, 10944),
        128,
        8,
        1408,
        shared_expert_size=1408,
        dense_layers=1,
        float32_gates=True,
        attention_extras=(96 + 2 * 8) * 128,
    ),
    "mixtral-8x7b": _mixture(
        _sized(_family("mixtral", 32000, 32768, head_dim=128), 4096, 32, 32, 8, 14336),
        8,
        2,
        14336,
        float32_gates=True,
    ),
    "smollm2-135m": _sized(_SMOLLM2, 576, 30, 9, 3, 1536),
    "smollm2-360m": _sized(_SMOLLM2, 960, 32, 15, 5, 2560),
    "smollm2-1.7b": _sized(_SMOLLM2, 2048, 24, 32, 32, 8192),
    "smollm3-3b": _sized(_family("smollm3", 128256, 65536, tied=True), 2048, 36, 16, 4, 11008),
    "mistral-7b-v0.3": _sized(_family("mistral", 32768, 32768), 4096, 32, 32, 8, 14336),
    "mistral-nemo-12b": _sized(_MISTRAL, 5120, 40, 32, 8, 14336),
    "mistral-small-24b": _sized(
        _family("mistral", 131072, 32768, head_dim=128), 5120, 40, 32, 8, 32768
    ),
}
"""Shapes from the models' published config.json; the position range is that of the base models,
without scaling that has to be switched on. Models whose layers attend to a window only (Gemma) are
left out: no formula knows them."""


def known_model(name: str) -> ModelShape | None:
    """The shape of a well-known model, such as `qwen3-8b` or `Qwen/Qwen3-8B`; None for others."""
    return MODELS.get(re.sub(r"-(instruct|base)$", "", name.lower().rpartition("/")[2]))

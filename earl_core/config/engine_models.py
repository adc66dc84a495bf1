"""Whether an engine and the trainer compute a model, by the numbers of its `config.json`. Workers
ask again, with what transformers adds to that file. Imports neither torch nor vllm."""

from __future__ import annotations

from earl_core.config.rollout import VllmConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.system.errors import ConfigError

PROVEN = ("glm4_moe", "mixtral", "olmoe", "qwen3_moe")
"""Mixtures of which vLLM was seen to compute with new experts as the trainer does. DeepSeek's
loader takes no joined experts, and its CPU build answered otherwise from the start."""
_TRIED_IN_VAIN = {
    "vllm": ("apertus", "diffllama", "gemma3n_text", "gpt_bigcode", "gpt_neox", "hrm_text"),
    "torch": ("opt",),
}
_UNTRAINED = (
    *("bloom", "falcon", "falcon_h1", "gpt_neo", "gptj", "kimi_linear", "lfm2", "mamba"),
    *("minimax", "minimax_m3_vl_text", "mistral4", "mpt", "nemotron", "stablelm"),
)
"""Model types that the trainer's own trial refuses, as they are released."""
CPU_HEADS: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_LATENTS: tuple[int, ...] = (576,)
"""Sizes of attention heads, and of latents, that the CPU build of vLLM 0.32 computes with."""
_CPU_EXPERTS = 32
"""Widths of experts that vLLM pads on a CPU to multiples of this, which its reload cannot."""
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on a CPU takes no other blocks than multiples of this."""
_HEAD_IS_EMBEDDING = ("cohere", "cohere2", "gemma2", "gemma3n_text")
"""Families whose output layer is the embeddings in vLLM, whatever config.json says."""


def check_trained(model: ModelShape) -> None:
    """Raise `ConfigError` for a model that cannot be trained, nor score what another has played."""
    check_layers(model)
    kind, window = model.model_type, model.lost_window
    if kind in _UNTRAINED:
        raise ConfigError(
            f"{kind} models cannot be trained on packed samples, as was tried: choose another model"
        )
    if window:
        raise ConfigError(
            f"{kind} models cannot be trained on packed samples: their layers do not hand on their "
            f"sliding window of {window} tokens: choose a model without one"
        )


def check_layers(model: ModelShape) -> None:
    """Raise `ConfigError` for layers that nothing here computes."""
    if model.other_layers:
        raise ConfigError(
            f"{model.model_type} models have layers of type {', '.join(model.other_layers)}, which "
            "neither the torch engine nor training computes: choose another model"
        )


def check_context(positions: int, wanted: int) -> None:
    """Raise `ConfigError` where a model has fewer positions than tokens are wanted of a
    sequence."""
    if positions and wanted > positions:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's {positions} positions: lower "
            "rollout.max_model_len"
        )


def check_tried(model: ModelShape, engine: str) -> None:
    """Raise `ConfigError` for a model type that an engine was tried with in vain."""
    kind = model.model_type
    if kind in _TRIED_IN_VAIN[engine]:
        other = "torch" if engine == "vllm" else "vllm"
        raise ConfigError(
            f"rollout.engine={engine} was tried with a {kind} model, and did not start or "
            f"answered otherwise than transformers: set rollout.engine={other}"
        )
    if model.experts > 1 and engine == "vllm" and kind not in PROVEN:
        raise ConfigError(
            f"rollout.engine=vllm was proven to take new experts of {', '.join(PROVEN)} only, and "
            f"this is a {kind} model of {model.experts}: set rollout.engine=torch"
        )


def check_on_vllm(model: ModelShape, ranks: int, on_cpu: bool) -> None:
    """Raise `ConfigError` for an output layer that vLLM would not compute with and, on a CPU, for
    attention heads with which it would die at the first prompt and for a mixture that it could not
    reload. ranks: tensor-parallel ones of an engine."""
    kind = model.model_type
    if kind in _HEAD_IS_EMBEDDING and not model.tied_embeddings:
        raise ConfigError(
            f"vLLM computes the logits of {kind} models with their embeddings, and this one has an "
            "output layer of its own: use rollout.engine=torch"
        )
    if not on_cpu:
        return
    latent = model.latent
    sizes, what = (CPU_HEADS, "attention") if latent is None else (CPU_LATENTS, "latent attention")
    size = model.head_size if latent is None else latent.cached
    if size not in sizes and model.attention_layers:
        raise ConfigError(
            f"vLLM on a CPU takes {what} heads of {', '.join(map(str, sizes))} numbers, this "
            f"{kind} model has heads of {size}: use rollout.engine=torch"
        )
    if model.experts > 1 and model.expert_width % (ranks * _CPU_EXPERTS):
        raise ConfigError(
            f"vLLM on a CPU takes new experts whose width in each rank is a multiple of "
            f"{_CPU_EXPERTS}, and this {kind} model has {model.expert_width} over {ranks} "
            f"rank{'s' if ranks > 1 else ''}: use rollout.engine=torch"
        )


def check_cache(settings: VllmConfig) -> None:
    """Raise `ConfigError` for a KV cache that vLLM does not make on a CPU."""
    if (settings.block_size or CPU_BLOCK_TOKENS) % CPU_BLOCK_TOKENS:
        raise ConfigError(
            f"rollout.vllm.block_size is {settings.block_size}; without a GPU it must be a "
            f"multiple of {CPU_BLOCK_TOKENS}"
        )
    if settings.kv_cache_gib is None:
        raise ConfigError("on a machine without a GPU set rollout.vllm.kv_cache_gib")

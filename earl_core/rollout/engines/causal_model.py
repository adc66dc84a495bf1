"""A transformers model that the torch engine computes rightly, and its linear layers, which add an
adapter's pairs to their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from earl_core.config.engine_models import check_layers
from earl_core.pretrained.architecture import context_length, model_config, shape_of
from earl_core.pretrained.logit_transform import LogitTransform
from earl_core.rollout.engines.slot_cache import ATTENTION, windows_seen
from earl_core.system.errors import ConfigError
from earl_core.weights.adapter_pairs import Pair


def load_causal_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, int]:
    """The model in evaluation mode, without gradients, and its context in tokens.

    `max_model_len` 0 means the model's own position range. Raises `ConfigError` for a model that
    would be computed wrongly.
    """
    config = model_config(directory, trust_remote_code)
    max_model_len = context_length(config.get_text_config(), max_model_len)
    check_layers(shape_of(config))
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
    )
    model = model.to(device).eval().requires_grad_(False)
    with windows_seen() as seen:
        _check_head(model, dtype, device)
    if not any(seen):
        _refuse_windows(config, max_model_len)
    return model, max_model_len


@torch.inference_mode()
def _check_head(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Last hidden state times head, transformed as is known, must be the model's logits."""
    kind = model.config.model_type
    tokens = torch.tensor([[1, 3]], device=device)
    mask = torch.zeros(1, 1, 2, 2, dtype=dtype, device=device)
    inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    try:
        hidden = model.base_model(**inputs).last_hidden_state
        own = LogitTransform.of(model.config)(model.get_output_embeddings()(hidden)).float()
        full = model(**inputs).logits.float()
    except Exception as error:
        raise ConfigError(
            f"the torch engine cannot run {kind} models ({type(error).__name__}: {error}): choose "
            "another model, or rollout.engine=vllm if training takes this one"
        ) from error
    # Weights that have diverged are told when they answer.
    near = 1e-2 * float(full.nan_to_num().abs().max())
    if not torch.allclose(own, full, atol=near, rtol=1e-2, equal_nan=True):
        raise ConfigError(
            f"{kind} models change their logits after the output layer in a way that neither the "
            "torch engine nor training reproduces: choose another model"
        )


def _refuse_windows(config: PretrainedConfig, max_model_len: int) -> None:
    """One causal mask serves all layers, so a window that they do not ask for would be ignored."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if windowed and window and window < max_model_len:
        raise ConfigError(
            f"{config.model_type} layers do not hand on their sliding window of {window} tokens, "
            f"and would attend to the whole context of {max_model_len}: set "
            f"rollout.max_model_len to {window}, or use rollout.engine=vllm if training takes this "
            "model"
        )


@dataclass(frozen=True)
class Pairs:
    """Pairs by the names of their matrices, and the factor of their products."""

    by_matrix: Mapping[str, Pair] = field(default_factory=dict)
    scale: float = 1.0


NO_PAIRS = Pairs()


class PairedLayers:
    """Every linear layer of a model but its head. `pairs`: those of the next forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.pairs = NO_PAIRS
        head = model.get_output_embeddings()
        layers = {
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not head
        }
        self.matrices: dict[str, torch.Tensor] = {n: each.weight for n, each in layers.items()}
        for name, layer in layers.items():
            layer.register_forward_hook(partial(self._add, name))

    def _add(
        self, name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """W x + alpha / rank * B A x: two thin products, no matrix is made."""
        pair = self.pairs.by_matrix.get(name)
        if pair is None:
            return output
        a, b = pair
        return output + F.linear(F.linear(inputs[0], a), b) * self.pairs.scale

"""What a model does with its logits after the output layer: one factor, and a soft cap.

Granite divides them, Cohere multiplies them, Gemma 2 lets none exceed a cap c: c * tanh(z / c)
(arXiv 2408.00118, equation 1). Trainer, reference and engines read it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISOR = "logits_scaling"
_MULTIPLIED_BY_IT = frozenset({"hyperclovax"})
"""Model types for which the divisor's name means a factor."""


@dataclass(frozen=True)
class LogitTransform:
    """scale: what the output layer's results are multiplied with, above 0. cap: the limit that
    tanh puts on the products; None: there is none."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitTransform:
        """What the configuration says. A model that does something else has other logits, which
        whoever loads it compares."""
        text: Any = config.get_text_config()
        scale = 1.0
        for name in _FACTORS:
            scale *= getattr(text, name, None) or 1.0
        divisor = getattr(text, _DIVISOR, None) or 1.0
        scale *= divisor if text.model_type in _MULTIPLIED_BY_IT else 1 / divisor
        return cls(scale, getattr(text, "final_logit_softcapping", None) or None)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, float32 where anything is changed; logits: the output layer's."""
        if self == NO_TRANSFORM:
            return logits
        scaled = logits.float() * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


NO_TRANSFORM = LogitTransform()

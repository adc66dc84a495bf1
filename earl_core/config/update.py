"""The update stage: optimizer, precision, batch splitting."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from earl_core.config.settings import Settings


class UpdateConfig(Settings):
    """How the policy is updated from one iteration's episodes."""

    precision: Literal["bf16", "fp32"] = Field(
        default="bf16",
        description="bf16: fp32 master weights and sums of gradients, bf16 copies that compute.",
    )
    learning_rate: float = Field(
        default=1e-6, gt=0, description="AdamW's step size after the warm-up; 1e-6 suits 1B and up."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the rate falls towards 0 from the warm-up to the last iteration.",
    )
    warmup_iterations: int = Field(
        default=0, ge=0, description="Iterations over which the rate rises linearly; 0: none."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="AdamW's: each step takes this share, times the rate, off matrices, not off "
        "vectors such as norms; 0: none.",
    )
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="AdamW's memory of the gradient's mean."
    )
    beta2: float = Field(
        default=0.95, ge=0, lt=1, description="AdamW's memory of the gradient's square."
    )
    epsilon: float = Field(
        default=1e-8, gt=0, description="AdamW's: added to the root of the mean square."
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="A gradient with a larger norm, over all parameters, is scaled down to it.",
    )
    epochs: int = Field(default=1, ge=1, description="Passes over an iteration's episodes.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps in each epoch.")
    max_tokens_per_microbatch: int = Field(
        default=4096, ge=1, description="Tokens packed into one forward pass."
    )
    max_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Stop before a step when the log-probs of the engine and of the trainer differ "
        "by more than this on average, in nats. None: 0.3, or 0.01 where both compute in float32.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep the inputs of the layers only and compute the rest again in the backward "
        "pass: less memory, about a third more time.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, compute the same bits from the same samples each time, with slower "
        "kernels where there are two; a CPU does so anyway.",
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads of each rank; 0: the cores divided among them."
    )

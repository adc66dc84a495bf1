"""The update stage: optimizer, precision, batch splitting."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from earl_core.deployment.stage_deployment import Checkpointing
from earl_core.system.settings import Settings

_USUAL = 4096
_ON_GPU = 16384
"""A 1.5B model's update does a sixth more work in a second than with 4,096, by the roofline of its
operators."""


class UpdateConfig(Settings):
    """How the policy is updated from one iteration's episodes."""

    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Of the update and of the reference. bf16: fp32 master weights and sums of "
        "gradients, bf16 copies that compute. auto: bf16 where the devices of all hosts compute it "
        "fast, else fp32; the run keeps what it began with.",
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
    max_tokens_per_microbatch: int | None = Field(
        default=None,
        ge=1,
        description="Tokens packed into one forward pass; a longer sample is one of its own. None: "
        "4,096, on a GPU the most of 16,384, 8,192, ... 1,024 that its memory holds.",
    )
    max_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Stop before a step when the log-probs of the engine and of the trainer differ "
        "by more than this on average, in nats. None: 0.3, or 0.01 where both compute in float32.",
    )
    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="What the layers compute again in the backward pass. selective: all but matrix "
        "products and attention, about half the memory in little more time; compiled layers keep "
        "little more anyway. full: everything from their inputs, a fraction of the memory in about "
        "a third more time.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile each decoder layer (torch.compile), around attention: fewer passes "
        "over memory, half a minute more at the start. None: on a GPU yes, or with a warning no "
        "where the compiler does not work; on a CPU no.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU, compute the same bits from the same samples each time, with slower "
        "kernels where there are two; a CPU does so anyway.",
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads of each rank; 0: the cores divided among them."
    )

    @property
    def mixed(self) -> bool:
        """Whether bf16 copies compute."""
        return self.precision != "fp32"

    def compiles(self, gpu: bool) -> bool:
        """Whether layers are compiled on a GPU, or on a CPU, where the compiler works."""
        return gpu if self.compile is None else self.compile

    def tokens_per_microbatch(self, gpu: bool) -> int:
        """Tokens of a microbatch, at most, before a GPU's memory has its say."""
        return self.max_tokens_per_microbatch or (_ON_GPU if gpu else _USUAL)

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(
                f"update.activation_checkpointing is a word: write {'full' if value else 'none'} "
                f"instead of {str(value).lower()}, or selective"
            )
        return value

"""The update stage: optimizer, precision, batch splitting."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from earl_core.deployment.stage_deployment import Checkpointing
from earl_core.system.settings import Settings

_USUAL = 4096
_ON_GPU = 16384
"""A 1.5B model's update does a sixth more work in a second than with 4,096, by its roofline."""


class UpdateConfig(Settings):
    """Settings of the policy's update from one iteration's episodes."""

    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Precision of the update and of the reference model. bf16: bf16 computation "
        "with fp32 master weights and fp32 sums of gradients. auto: bf16 where the devices of "
        "all hosts compute it fast, else fp32; the run keeps what it began with.",
    )
    learning_rate: float = Field(
        default=1e-6,
        gt=0,
        description="Peak learning rate of AdamW, after the warm-up; 1e-6 suits models of 1B "
        "parameters and more.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate schedule from the warm-up to the last iteration; linear and "
        "cosine fall towards 0.",
    )
    warmup_iterations: int = Field(
        default=0, ge=0, description="Iterations of linear learning rate warm-up; 0: none."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay of AdamW, for matrices but not for vectors such as norms; 0: "
        "none.",
    )
    beta1: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="AdamW's beta1: decay of the running mean of gradients.",
    )
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="AdamW's beta2: decay of the running mean of squared gradients.",
    )
    epsilon: float = Field(
        default=1e-8,
        gt=0,
        description="AdamW's epsilon, added to the root of the mean squared gradient.",
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="Gradient clipping: largest norm of the gradient over all parameters.",
    )
    epochs: int = Field(default=1, ge=1, description="Passes over the episodes of an iteration.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps in each epoch.")
    zero_advantage: Literal["skip", "compute"] | None = Field(
        default=None,
        description="Samples whose advantage is 0 at every trained token. skip: they stay in "
        "denominators and counts, and nothing is computed of them; a twentieth, drawn by seed, is "
        "computed for the mismatch and the entropy. compute: they are computed like all others. "
        "None: skip where it changes no gradient, with any loss of EARL's without KL, entropy and "
        "balanced experts in it; else compute.",
    )
    max_tokens_per_microbatch: int | None = Field(
        default=None,
        ge=1,
        description="Tokens packed into one forward pass; a longer sample has one to itself. "
        "None: 4,096 on a CPU; on a GPU the most of 16,384, 8,192, ... 1,024 that its memory "
        "holds.",
    )
    max_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean difference between the log-probs of engine and trainer, in "
        "nats; the run stops before an optimizer step that exceeds it. None: 0.3, or 0.01 where "
        "both compute in float32.",
    )
    least_sample_size: float = Field(
        default=0.3,
        ge=0,
        lt=1,
        description="Smallest effective sample size that the weights of "
        "algorithm.importance_correction may leave, as a share of the tokens, and of the episodes. "
        "0: any.",
    )
    small_sample: Literal["warn", "stop"] = Field(
        default="warn",
        description="Consequence of a smaller one. warn: a warning. stop: the run stops before the "
        "update's first step.",
    )
    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="Activations that the backward pass computes again instead of keeping them. "
        "selective: all but matrix products and attention, about half the memory in "
        "little more time; compiled layers keep little more anyway. full: each layer from its "
        "inputs, a fraction of the memory in about a third more time.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile each decoder layer with torch.compile, around attention: fewer "
        "passes over memory, half a minute more at the start. None: on GPUs where the compiler "
        "works, else not, with a warning; never on a CPU.",
    )
    deterministic: bool = Field(
        default=False,
        description="Compute the same bits from the same samples each time, on a GPU with slower "
        "kernels where there are two; on a CPU this is so anyway.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of each rank; 0: the cores are divided among them.",
    )

    @property
    def mixed(self) -> bool:
        """True when bf16 copies compute."""
        return self.precision != "fp32"

    def compiles(self, gpu: bool) -> bool:
        """Tell whether layers are compiled, on a GPU or on a CPU, where the compiler works."""
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

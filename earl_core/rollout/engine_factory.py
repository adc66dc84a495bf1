"""From configuration and deployment to an engine and a chat tokenizer; imports them when called."""

from __future__ import annotations

from typing import Any

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config import RunConfig
from earl_core.pretrained.model_directory import load_tokenizer, model_directory
from earl_core.rollout.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine


def load_chat_tokenizer(config: RunConfig) -> ChatTokenizer:
    """The model's tokenizer with the configured template, prefix and stops.

    Raises `ConfigError` for a directory without a tokenizer, and for a template that is not there
    or cannot be used.
    """
    rollout = config.rollout
    tokenizer = load_tokenizer(config.model)
    return ChatTokenizer(tokenizer, rollout.answer_prefix, rollout.stop, rollout.tool_format)


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
    rollout, directory = config.rollout, model_directory(config.model)
    common: dict[str, Any] = {
        "policy_version": None,
        "dtype": rollout.dtype,
        # No deployment has more; fewer are a limit, which may change while the engine lives.
        "max_running_requests": rollout.max_running_requests,
        "max_model_len": deployment.max_model_len or rollout.max_model_len,
        "threads": deployment.threads * deployment.tensor_parallel,
        "float32_head": config.model.float32_head,
        "trust_remote_code": config.model.trust_remote_code,
    }
    if rollout.engine == "torch":
        from earl_core.rollout.engines.torch_engine import TorchEngine

        return TorchEngine(directory, **common)
    from earl_core.rollout.engines.vllm_engine import VllmEngine

    ranks = deployment.tensor_parallel
    return VllmEngine(directory, tensor_parallel=ranks, settings=rollout.vllm, **common)

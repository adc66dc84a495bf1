"""From configuration and deployment to an engine and a chat tokenizer; imports them when called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config import ConfigError, RunConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.rollout.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Engine


def load_chat_tokenizer(config: RunConfig) -> ChatTokenizer:
    """The tokenizer of the model's directory with the configured template, prefix and stops.

    Raises `ConfigError` for a directory without a tokenizer, and for a template that is not there
    or cannot be used.
    """
    from transformers import AutoTokenizer

    directory = model_directory(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model directory {directory} has no tokenizer that transformers can load "
            f"({str(error).splitlines()[0]}): copy the tokenizer's files into it"
        ) from error
    return ChatTokenizer(
        tokenizer,
        _template(config.model.chat_template),
        config.rollout.answer_prefix,
        config.rollout.stop,
    )


def build_engine(config: RunConfig, deployment: StageDeployment) -> Engine:
    """The configured engine, not started. Raises `ConfigError` when the model is missing.

    Its policy version is undefined until weights are loaded.
    """
    rollout, directory = config.rollout, model_directory(config)
    common: dict[str, Any] = {
        "policy_version": None,
        "dtype": rollout.dtype,
        "max_running_requests": deployment.max_running_requests or rollout.max_running_requests,
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


def model_shape(config: RunConfig) -> ModelShape:
    """The model's sizes, by its `config.json`.

    Raises `ConfigError` when the model is missing or its configuration lacks the usual numbers.
    """
    path = model_directory(config) / "config.json"
    try:
        return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error


def model_directory(config: RunConfig) -> Path:
    """The initial model's directory. Raises `ConfigError` when there is no model in it."""
    directory = Path(config.model.path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {directory} (no config.json in it): set model.path to a Hugging "
            "Face model directory, or model.builder to a function that makes one"
        )
    return directory


def _template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the chat template {file} cannot be read ({error.strerror}): correct "
            "model.chat_template, or remove it to use the tokenizer's own"
        ) from error

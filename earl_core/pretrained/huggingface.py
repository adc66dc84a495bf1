"""Transformers and accelerate, without what they would import only because it is installed.

Where they find scikit-learn, SciPy and boto3, they import them, and with them pandas, for assisted
decoding, object detection and a cloud's configuration file. MLflow brings the first two, S3
storage the third, and each would cost every worker a good part of its start. Modules of the
workers take what they need of both libraries from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

import transformers.utils

__all__ = [
    "AttentionInterface",
    "AutoModelForCausalLM",
    "GradientCheckpointingLayer",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "custom_object_save",
    "init_empty_weights",
]

_QUESTIONS = ("is_scipy_available", "is_sklearn_available")


@contextmanager
def _unused_packages_hidden() -> Iterator[None]:
    """Transformers hears that they are not installed while it is imported; so does accelerate."""
    answers = {name: getattr(transformers.utils, name) for name in _QUESTIONS}
    hidden = "boto3" not in sys.modules
    try:
        for name in answers:
            setattr(transformers.utils, name, lambda: False)
        if hidden:
            sys.modules["boto3"] = cast(ModuleType, None)
        yield
    finally:
        for name, answer in answers.items():
            setattr(transformers.utils, name, answer)
        if hidden:
            del sys.modules["boto3"]


with _unused_packages_hidden():
    from accelerate import init_empty_weights
    from transformers import (
        AttentionInterface,
        AutoModelForCausalLM,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.modeling_layers import GradientCheckpointingLayer

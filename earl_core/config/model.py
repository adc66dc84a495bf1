"""Which model is trained, and how to make it when it is not there yet."""

from __future__ import annotations

from pydantic import Field, field_validator

from earl_core.config.base import Options, Settings


class ModelConfig(Settings):
    """The initial policy: any causal language model that transformers loads."""

    path: str = Field(
        description="A Hugging Face model directory (weights, config and tokenizer). "
        "Relative paths are relative to the working directory."
    )
    builder: str | None = Field(
        default=None,
        description="`package.module:function` that makes the model when `path` does not exist; "
        "called as function(directory, **builder_options) in a worker process.",
    )
    builder_options: Options = Field(default_factory=dict)
    chat_template: str | None = Field(
        default=None, description="A Jinja file that replaces the tokenizer's chat template."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model directory."
    )

    @field_validator("builder")
    @classmethod
    def _import_path(cls, value: str | None) -> str | None:
        if value is not None and value.count(":") != 1:
            raise ValueError(
                f"model.builder must look like `package.module:function`, not {value!r}"
            )
        return value

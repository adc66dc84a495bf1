"""Secrets in a configuration: refused where they stand, referred to where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from earl_core.config.run import RunConfig
from earl_core.secrets import resolve
from earl_core.system.errors import ConfigError


def check_references(config: RunConfig) -> None:
    """See that every reference leads to something here, and hide from now on what that is.

    Raises `ConfigError`. Nothing is returned: the process that uses a value resolves it.
    """
    for key, value in _referring(config):
        try:
            resolve(value)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def _referring(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "environment.options", config.environment.options
    yield "evaluation.options", config.evaluation.options
    yield "model.builder_options", config.model.builder_options
    yield "dispatch.spill_url", config.dispatch.spill_url
    yield "tracking.uri", config.tracking.uri

"""Secrets in a configuration: refused where they stand, referred to where they are used."""

from __future__ import annotations

from earl_core.config.refusal import REFERRING
from earl_core.config.run import RunConfig
from earl_core.secrets import resolve
from earl_core.system.errors import ConfigError


def check_references(config: RunConfig) -> None:
    """See that every reference leads to something here, and hide from now on what that is.

    Raises `ConfigError`. Nothing is returned: the process that uses a value resolves it.
    """
    for key in REFERRING:
        section, _, name = key.partition(".")
        try:
            resolve(getattr(getattr(config, section), name))
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

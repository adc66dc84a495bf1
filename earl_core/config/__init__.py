"""Configuration: pydantic models, loading and overrides, the resolved table. Imports no torch."""

from earl_core.config.load import check_references, dump_config, load_config, parse_config
from earl_core.config.run import RunConfig
from earl_core.system.errors import ConfigError
from earl_core.system.settings import Settings

__all__ = [
    "ConfigError",
    "RunConfig",
    "Settings",
    "check_references",
    "dump_config",
    "load_config",
    "parse_config",
]

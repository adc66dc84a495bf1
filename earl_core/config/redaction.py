"""Files of rules of redaction (`secrets.rules`), as people write them."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from earl_core.config.load import explain
from earl_core.config.yaml_text import read_yaml
from earl_core.secrets.rules import RedactionRules
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text


def load_rules(path: Path) -> RedactionRules:
    """The rules in a YAML file. Raises `ConfigError` with every problem."""
    what = str(path)
    given = read_yaml(read_text(path, what), what)
    if not isinstance(given, dict):
        raise ConfigError(f"{what} holds no rules: write words, patterns, turns or fields")
    try:
        return RedactionRules.model_validate(given)
    except ValidationError as error:
        raise ConfigError(explain(error, what)) from None

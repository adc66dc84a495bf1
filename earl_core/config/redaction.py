"""Rules of redaction (`secrets.rules`): their files, and those that a run asks for."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from earl_core.config.load import explain
from earl_core.config.run import RunConfig
from earl_core.config.yaml_text import read_yaml
from earl_core.secrets import learn_rules
from earl_core.secrets.rules import Redaction, RedactionRules
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text


def load_rules(path: Path) -> RedactionRules:
    """The rules in a YAML file. Raises `ConfigError` with every problem."""
    what = str(path)
    try:
        given = read_yaml(read_text(path, what), what)
    except OSError as error:
        raise ConfigError(f"the rules {path} cannot be read: {error.strerror}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{what} holds no rules: write words, patterns, turns or fields")
    try:
        return RedactionRules.model_validate(given)
    except ValidationError as error:
        raise ConfigError(explain(error.errors(), what)) from None


def redaction_of(config: RunConfig) -> Redaction:
    """What `tracking.redact` asks for, or the redactor alone; this process applies it from now on
    to all that it shows (`secrets.shareable`). Raises `ConfigError`."""
    if config.tracking.redact is None:
        return Redaction()
    try:
        redaction = Redaction(load_rules(Path(config.tracking.redact)))
    except ConfigError as error:
        raise ConfigError(f"tracking.redact: {error}") from None
    learn_rules(config.tracking.redact, redaction.hide)
    return redaction

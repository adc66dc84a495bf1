"""Settings that differ between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.config import RunConfig
from earl_core.run.record import flat, settings_of
from earl_core.secrets import find_secrets
from earl_core.secrets.redactor import HIDDEN


def differing_settings(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Each setting that is not the same everywhere, by its dotted name, with the value of each run;
    None where it has none. Names and places of runs are left out, and secrets are hidden."""
    found = differing([settings_of(config) for config in configs])
    return {name: [without_secret(name, value) for value in found[name]] for name in found}


def without_secret(name: str, value: Any) -> Any:
    """The value of a setting for people: a word in place of one that looks like a secret."""
    return HIDDEN if any(find_secrets(value, name)) else value


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The same of nested mappings."""
    sides = [dict(flat(each)) for each in settings]
    found = {}
    for name in dict.fromkeys(name for side in sides for name in side):
        values = [side.get(name) for side in sides]
        if any(value != values[0] for value in values):
            found[name] = values
    return found

"""No secret in a run file: what it says which is refused, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from earl_core.secrets import find_secrets, is_reference
from earl_core.system.errors import ConfigError

_REFERRING = {
    r"environment\.options": "environment.options",
    r"environments\.\d+\.options": "environments",
    r"environments?(\.\d+)?\.mcp\.\d+\.(variables|headers)": "environment.mcp",
    r"evaluation\.options": "evaluation.options",
    r"evaluation\.suites\.\d+\.(options|mcp\.\d+\.(variables|headers))": "evaluation.suites",
    r"reward\.functions\.\d+\.options": "reward.functions",
    r"model\.builder_options": "model.builder_options",
    r"dispatch\.spill_url": "dispatch.spill_url",
    r"tracking\.uri": "tracking.uri",
}
"""Settings whose values may be references, and how people are told of them; the process that uses
them resolves them."""


def check_no_secrets(raw: Any) -> None:
    """Raise `ValueError` for plain data with a secret in it, or with a reference where none is
    resolved. Every place is named, no value is shown."""
    problems = [
        f"{found.key} holds a secret ({found.reason}), which would be stored and shown with the "
        "run: write `env:NAME` (a variable exported before the command, also before a resume) or "
        "`file:/whole/path` (readable by you alone) in its place"
        for found in find_secrets(raw)
    ]
    problems += [
        f"{key} is a reference, but none is resolved there, only in "
        f"{', '.join(_REFERRING.values())}: write the value itself"
        for key, _, allowed in references(raw)
        if not allowed
    ]
    if problems:
        raise ValueError("\n  ".join(problems))


def references(raw: Any) -> Iterator[tuple[str, str, bool]]:
    """Every reference in plain data: its key, its text, and whether it is resolved there."""
    for key, text in _texts(raw, ""):
        if is_reference(text):
            yield key, text, any(re.match(rf"{each}(\.|$)", key) for each in _REFERRING)


def refuse_override(key: str, value: Any) -> None:
    """Raise `ConfigError` for a secret that was given on a command line."""
    for found in find_secrets(value, key):
        raise ConfigError(
            f"{found.key} holds a secret ({found.reason}), and everyone on this machine can read "
            f"a command line: give {key}=env:NAME or {key}=file:/whole/path instead, and replace "
            "the secret that you typed, because it stood in the list of processes and in the "
            "shell's history"
        )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, f"{key}.{number}")

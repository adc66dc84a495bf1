"""Detection of secrets in a configuration: by their name, or by their form.

Found are values under a telling name, keys with well-known beginnings, PEM blocks, JSON web tokens,
URLs with a password or a signature, assignments inside of a text, and random text under a name that
could be a key's. Not found is a password that nothing tells from a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from earl_core.secrets.names import is_password_name, is_secret_name, words_of
from earl_core.secrets.patterns import is_placeholder, is_reference, looks_random, secrets_in
from earl_core.secrets.redactor import environment_secrets

_SUSPICIOUS = frozenset(
    {
        "key", "keys", "auth", "token", "tokens", "cookie", "cookies", "session", "sig",
        "signature", "salt", "pin", "pass", "login", "secret", "secrets", "password", "passwd",
        "pwd", "credential", "credentials", "cert", "pem", "oauth", "sas",
    }
)  # fmt: skip


def is_suspicious_name(name: str) -> bool:
    """Tell whether something random under this name is a secret."""
    return not _SUSPICIOUS.isdisjoint(words_of(name))


class Found(NamedTuple):
    """A secret: the dotted key that it stands under, and what gives it away, without it."""

    key: str
    reason: str


def find_secrets(value: Any, key: str = "") -> Iterator[Found]:
    """Everything in plain data that looks like a secret; references are none."""
    yield from _walk(value, key, key.rpartition(".")[2], False)


def _walk(value: Any, key: str, name: str, inside: bool) -> Iterator[Found]:
    if isinstance(value, Mapping):
        for inner, item in value.items():
            text = str(inner)
            below = f"{key}.{text}" if key else text
            if reason := describe(text):
                yield Found(f"a key under {key}" if key else "a key", reason)
                below = f"{key}.(hidden)"
            under = inside or (is_secret_name(name) and name != "")
            yield from _walk(item, below, text, under)
    elif isinstance(value, str):
        if reason := _reason(value, name, inside):
            yield Found(key, reason)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        before: Any = None
        for number, item in enumerate(value):
            flag = before if isinstance(before, str) and before.startswith("-") else ""
            yield from _walk(item, f"{key}.{number}", flag.lstrip("-") or name, inside)
            before = item
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_password_name(name):
        yield Found(key, "its name says that it is a secret")


def _reason(value: str, name: str, inside: bool) -> str | None:
    if is_reference(value) or not value.strip():
        return None
    if (inside or is_secret_name(name)) and not is_placeholder(value):
        return "its name says that it is a secret"
    if is_suspicious_name(name) and looks_random(value):
        return "it is random text under a name that keys have"
    return describe(value)


def describe(text: str) -> str | None:
    """Describe the secret in a text, whatever its name; None where there is none."""
    for span in secrets_in(text):
        return span.reason
    for variable, secret in environment_secrets().items():
        if secret == text or (len(secret) >= 12 and secret in text):
            return f"it is the value of the environment variable {variable}"
    return None

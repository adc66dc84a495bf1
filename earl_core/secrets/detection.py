"""What in a configuration looks like a secret: by its name, or by itself.

Found are values under a telling name, keys with well-known beginnings, PEM blocks, JSON web tokens,
URLs with a password or a signature, assignments inside of a text, and random text under a name that
could be a key's. Not found is a password that nothing tells from a word.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from earl_core.secrets.redactor import (
    ASSIGNMENT,
    HEADER,
    KEYS,
    PARAMETER,
    PEM,
    USERINFO,
    environment_secrets,
    is_reference,
    is_secret_name,
    is_secret_parameter,
    words_of,
)

_SUSPICIOUS = frozenset(
    {
        "key", "keys", "auth", "token", "tokens", "cookie", "cookies", "session", "sig",
        "signature", "salt", "pin", "pass", "login", "secret", "secrets", "password", "passwd",
        "pwd", "credential", "credentials", "cert", "pem", "oauth", "sas",
    }
)  # fmt: skip


def is_password_name(name: str) -> bool:
    """Whether even a number under this name is a secret; a `secret: 7` may be a game's."""
    return bool(words_of(name)) and words_of(name)[-1] in ("password", "passwd", "pwd", "passcode")


def is_suspicious_name(name: str) -> bool:
    """Whether something random under this name is a secret."""
    return not _SUSPICIOUS.isdisjoint(words_of(name))


LONE_USER = re.compile(r"(://)([^\s/?#:@]{20,})(?=@)")

_PLACEHOLDER = re.compile(r"[<{$*]|\(hidden\)|x{4,}|\.\.\.|(?i:none|anon|anonymous)$")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
_RANDOM_BITS = 3.5


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
    if (inside or is_secret_name(name)) and not _PLACEHOLDER.match(value):
        return "its name says that it is a secret"
    if is_suspicious_name(name) and _looks_random(value):
        return "it is random text under a name that keys have"
    return describe(value)


def describe(text: str) -> str | None:
    """What in a text is a secret, whatever its name; None for nothing."""
    if KEYS.search(text) or PEM.search(text):
        return "it looks like a key"
    if USERINFO.search(text) or any(_looks_random(m[2]) for m in LONE_USER.finditer(text)):
        return "it is a URL with a password"
    if "://" in text:
        for match in PARAMETER.finditer(text):
            if is_secret_parameter(match[2]) and not _PLACEHOLDER.match(match[3]):
                return f"the URL's parameter `{match[2]}` is a secret"
    if any(not _PLACEHOLDER.match(m[2]) for m in HEADER.finditer(text)):
        return "it looks like a header that lets in"
    for match in ASSIGNMENT.finditer(text):
        if is_secret_name(match[2]) and not (
            _PLACEHOLDER.match(match[3]) or is_reference(match[3])
        ):
            return f"it gives `{match[2]}` a value"
    for variable, secret in environment_secrets().items():
        if secret == text or (len(secret) >= 12 and secret in text):
            return f"it is the value of the environment variable {variable}"
    return None


def _looks_random(text: str) -> bool:
    if not _RANDOM.fullmatch(text):
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) >= _RANDOM_BITS

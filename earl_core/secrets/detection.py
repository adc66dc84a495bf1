"""What looks like a secret: by its name, or by itself.

Found are values under a telling name, keys with well-known beginnings, PEM blocks, JSON web tokens,
URLs with a password or a signature, assignments inside of a text, and random text under a name that
could be a key's. Not found is a password that nothing tells from a word.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:(?!//)\S.*")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")

_LAST = _set(
    """
    password passwords passwd pwd pw passphrase passcode secret secrets credential
    credentials creds authorization bearer jwt apikey apikeys accesskey secretkey privatekey
    authkey authtoken accesstoken authstring apitoken
    """
)
"""A name that ends with one of these words."""

_KEYS = _set(
    """
    api access secret private account signing encryption ssh master service subscription
    storage client auth deploy license hmac shared session webhook ssl tls rsa pgp gpg
    """
)
"""... or with one of these and `key` or `keys`."""

_ENDINGS = ("password", "passwd", "passphrase", "apikey", "accesskey", "secretkey", "privatekey")
_PHRASES = frozenset({"access key id", "auth string", "connection string", "set cookie"})

_MODEL_TOKENS = _set(
    """
    eos bos pad unk sep cls mask stop start end begin special per image audio video think
    first last next new previous added tool bot turn message end max min num n count by each
    one a the prompt answer response padding control separator newline space
    """
)
"""What stands before `token` where a model's vocabulary is meant."""

_SUSPICIOUS = _set(
    """
    key keys auth token tokens cookie cookies session sig signature salt pin pass login
    secret secrets password passwd pwd credential credentials cert pem oauth sas
    """
)

_SIGNED = _set(
    """
    sig signature x-amz-signature x-amz-credential x-amz-security-token x-goog-signature
    x-goog-credential awsaccesskeyid googleaccessid auth pass pin key sas
    """
)


def is_reference(text: str) -> bool:
    """Whether a text stands for a secret that is kept elsewhere (`file://` begins a URL)."""
    return _REFERENCE.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """`AWS_SECRET_ACCESS_KEY2` and `awsSecretAccessKey` as lower-case words, without digits."""
    return tuple(word.lower() for word in _WORDS.findall(name))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what stands under this name is a secret, whatever it looks like."""
    words = words_of(name)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if (
        last in _LAST
        or last.endswith(_ENDINGS)
        or " ".join(words[-3:]) in _PHRASES
        or f"{before} {last}" in _PHRASES
    ):
        return True
    if last in ("key", "keys"):
        return before in _KEYS
    return last == "token" and before not in _MODEL_TOKENS


def is_password_name(name: str) -> bool:
    """Whether even a number under this name is a secret; a `secret: 7` may be a game's."""
    return bool(words_of(name)) and words_of(name)[-1] in ("password", "passwd", "pwd", "passcode")


def is_suspicious_name(name: str) -> bool:
    """Whether something random under this name is a secret."""
    return not _SUSPICIOUS.isdisjoint(words_of(name))


def is_secret_parameter(name: str) -> bool:
    """Whether a URL's parameter of this name lets whoever has the URL in."""
    return is_secret_name(name) or name.lower() in _SIGNED


KEYS = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
    (?:sk|pk|rk)[-_](?=[\w-]*\d)(?:live_|test_|ant-|proj-)?[\w-]{16,}
    | hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,} | glpat-[\w-]{16,}
    | (?:AKIA|ASIA)[0-9A-Z]{12,} | xox[abeoprs]-[\w-]{10,} | AIza[\w-]{30,} | ya29\.[\w-]{20,}
    | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{20,} | SG\.[\w-]{16,}\.[\w-]{16,} | r8_[A-Za-z0-9]{20,}
    | pn[ub]_[A-Za-z0-9]{20,} | dop_v1_[0-9a-f]{20,} | gsk_[A-Za-z0-9]{20,} | nvapi-[\w-]{20,}
    | eyJ[\w-]{6,}\.eyJ[\w-]{6,}\.[\w-]*
    )""",
    re.VERBOSE,
)
"""Keys that say by their beginning what they are."""

PEM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL
)
HEADER = re.compile(
    r"(?i)((?:\b(?:proxy-)?authorization\s*:|\bx-api-key\s*:|\b(?:bearer|basic)\b)\s*"
    r"(?:(?:bearer|basic|token|digest)\s+)?)((?=\S*\d)[\w.~+/=:-]{8,})"
)
USERINFO = re.compile(r"(://)([^\s/?#:@]*:[^\s/?#]+)(?=@)")
LONE_USER = re.compile(r"(://)([^\s/?#:@]{20,})(?=@)")
PARAMETER = re.compile(r"([?&;#])([\w.%-]+)=([^&;#\s\"']+)")
ASSIGNMENT = re.compile(r"((?:^|(?<=[\s\"',;{(\[]))-{0,2}([A-Za-z_][\w.-]+)=)([^\s\"',;]{4,})")

_PLACEHOLDER = re.compile(r"[<{$*]|\(hidden\)|x{4,}|\.\.\.|(?i:none|anon|anonymous)$")
_SHORTEST_FROM_ENVIRONMENT = 8
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


def environment_secrets() -> dict[str, str]:
    """The variables of this process's environment that hold secrets."""
    found = {}
    for name, value in os.environ.items():
        if len(value) < _SHORTEST_FROM_ENVIRONMENT:
            continue
        if is_secret_name(name) and not (value.startswith("/") and os.path.exists(value)):
            found[name] = value
        elif "://" in value and (match := USERINFO.search(value)):
            password = match[2].partition(":")[2]
            if len(password) >= _SHORTEST_FROM_ENVIRONMENT:
                found[name] = password
    return found


def _looks_random(text: str) -> bool:
    if not _RANDOM.fullmatch(text):
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) >= _RANDOM_BITS

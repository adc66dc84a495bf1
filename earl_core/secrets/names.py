"""Names under which secrets stand: of settings, variables, headers, parameters of URLs."""

from __future__ import annotations

import re
from functools import lru_cache


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
"""Words before `token` that mean a token of a model's vocabulary."""


_SIGNED = _set(
    """
    sig signature x-amz-signature x-amz-credential x-amz-security-token x-goog-signature
    x-goog-credential awsaccesskeyid googleaccessid auth pass pin key sas
    """
)


@lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """`AWS_SECRET_ACCESS_KEY2` and `awsSecretAccessKey` as lower-case words, without digits."""
    return tuple(word.lower() for word in _WORDS.findall(name))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Tell whether any value under this name is a secret."""
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


def is_secret_parameter(name: str) -> bool:
    """Tell whether a URL's parameter of this name lets whoever has the URL in."""
    return is_secret_name(name) or name.lower() in _SIGNED


def is_password_name(name: str) -> bool:
    """Tell whether even a number under this name is a secret; a `secret: 7` may be a game's."""
    return bool(words_of(name)) and words_of(name)[-1] in ("password", "passwd", "pwd", "passcode")

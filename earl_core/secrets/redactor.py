"""The one redactor: it hides secrets in what is stored, shown, printed or logged.

It knows values: those that this process resolved from references, and the secrets in its
environment. What looks like a secret by itself is hidden too, so that one that came another way
than ours (in a library's error, from an environment) stays out. By which names and patterns
secrets are recognised, `detection` has from here.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import sys
import threading
import traceback
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from earl_core.system.errors import EarlError

HIDDEN = "(hidden)"

E = TypeVar("E", bound=BaseException)

_SHORTEST = 4
_SHORTEST_LINE = 16
_lock = threading.Lock()
_known: frozenset[str] = frozenset()


def learn(value: str) -> None:
    """Hide this value from now on, in this process; of a URL that lets in, what does so."""
    global _known
    values = _parts_that_let_in(value) or {value}
    with _lock:
        _known |= {item for item in values if len(item.strip()) >= _SHORTEST}


def learn_url(url: str) -> None:
    """Hide what in a URL lets in, if anything does."""
    for part in _parts_that_let_in(url):
        learn(part)


def _parts_that_let_in(url: str) -> set[str]:
    if "://" not in url:
        return set()
    users = {match[2] for match in USERINFO.finditer(url)}
    passwords = {user.partition(":")[2] for user in users}
    given = [match for match in PARAMETER.finditer(url) if is_secret_parameter(match[2])]
    return users | passwords | {match[3] for match in given}


def redact(text: str) -> str:
    """The text with every known or recognisable secret replaced by `(hidden)`."""
    values = _known | frozenset(environment_secrets().values())
    if values:
        text = _pattern(values).sub(HIDDEN, text)
    return _hide_recognisable(text)


def redact_tree(value: Any) -> Any:
    """Plain data with all its text redacted, keys included."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_tree(name): redact_tree(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_tree(item) for item in value)
    return value


def redact_error(error: E) -> E:
    """The same exception with secrets hidden in its texts, and in those of its causes."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.args = tuple(redact(item) if isinstance(item, str) else item for item in one.args)
        if isinstance(one, EarlError):
            one.remedy = redact(one.remedy)
        if hasattr(one, "__notes__"):
            one.__notes__ = [redact(str(note)) for note in one.__notes__]
        one = one.__cause__ or one.__context__
    return error


@lru_cache(maxsize=8)
def _pattern(values: frozenset[str]) -> re.Pattern[str]:
    forms: set[str] = set()
    for value in values:
        lines = [line for line in value.splitlines() if len(line) >= _SHORTEST_LINE]
        for form in (value, *lines):
            plain = form.encode()
            forms |= {form, quote(form, safe=""), json.dumps(form)[1:-1]}
            forms |= {base64.b64encode(plain).decode(), base64.b64encode(b":" + plain).decode()}
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _hide_recognisable(text: str) -> str:
    def parameter(match: re.Match[str]) -> str:
        secret = is_secret_parameter(match[2])
        return f"{match[1]}{match[2]}={HIDDEN}" if secret else match[0]

    def assignment(match: re.Match[str]) -> str:
        secret = is_secret_name(match[2]) and not is_reference(match[3])
        return f"{match[1]}{HIDDEN}" if secret else match[0]

    text = PEM.sub(HIDDEN, text)
    text = KEYS.sub(HIDDEN, text)
    text = HEADER.sub(rf"\1{HIDDEN}", text)
    if "://" in text:
        text = USERINFO.sub(rf"\1{HIDDEN}", text)
        text = PARAMETER.sub(parameter, text)
    return ASSIGNMENT.sub(assignment, text) if "=" in text else text


def guard_output() -> None:
    """Hide secrets in everything that Python code of this process prints or logs from now on."""
    if not isinstance(sys.stdout, RedactedStream):
        sys.stdout, sys.stderr = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    guard_logging()


def guard_logging() -> None:
    """Hide secrets in all log records of this process, whoever handles them."""
    factory = logging.getLogRecordFactory()
    if getattr(factory, "redacts", False):
        return

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = factory(*arguments, **named)
        _redact_record(record)
        return record

    make.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


def _redact_record(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
    except Exception:  # a wrong format string; logging itself says so when it is handled
        return
    shown = redact(text)
    if shown != text:
        # Otherwise left alone: some formatters read the arguments.
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))


class RedactedStream:
    """A text stream that redacts what is written to it; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the redacted text; the length that was asked for, as callers expect."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line redacted."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


PARAMETER = re.compile(r"([?&;#])([\w.%-]+)=([^&;#\s\"']+)")


ASSIGNMENT = re.compile(r"((?:^|(?<=[\s\"',;{(\[]))-{0,2}([A-Za-z_][\w.-]+)=)([^\s\"',;]{4,})")


_SHORTEST_FROM_ENVIRONMENT = 8


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

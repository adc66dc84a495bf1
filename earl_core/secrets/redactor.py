"""The one redactor: it hides secrets in what is stored, shown, printed or logged.

It knows values: those that this process resolved from references, and the secrets in its
environment. A text that looks like a secret by itself is hidden too, so that one that came another
way than ours (in a library's error, from an environment) stays out.

What leaves the run directory also passes the rules that people give for it (`shareable`); records
of the run do not, so that rules may change and nothing is done again.
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
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from earl_core.secrets.names import is_secret_name
from earl_core.secrets.patterns import password_of, secrets_in
from earl_core.system.errors import EarlError

HIDDEN = "(hidden)"

E = TypeVar("E", bound=BaseException)
V = TypeVar("V")

_LINE = ("iteration", "iterations", "time")
_SHORTEST = 4
_SHORTEST_LINE = 16
_lock = threading.Lock()
_known: frozenset[str] = frozenset()
_rules: dict[str, Callable[[str], str]] = {}


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


def learn_rules(source: str, hide: Callable[[str], str]) -> None:
    """Have `shareable` pass texts through `hide` from now on, in this process, in the place of an
    earlier one of the same source."""
    with _lock:
        _rules[source] = hide
    _changed.cache_clear()


def _parts_that_let_in(url: str) -> set[str]:
    if "://" not in url:
        return set()
    found = {url[span.start : span.end] for span in secrets_in(url)}
    return found | {each.partition(":")[2] for each in found}


def redact(text: str) -> str:
    """The text with every known or recognisable secret replaced by `(hidden)`."""
    values = _known | frozenset(environment_secrets().values())
    if values:
        text = _pattern(values).sub(HIDDEN, text)
    return _hide_recognisable(text)


def redact_tree(value: Any) -> Any:
    """Plain data with all its text redacted, keys included."""
    return _tree(value, redact)


def shareable(text: str) -> str:
    """The text as it may leave the run directory: redacted, and after the rules learnt."""
    text = redact(text)
    for hide in list(_rules.values()):
        text = hide(text)
    return text


def shareable_tree(value: Any) -> Any:
    """Plain data with all its text as it may leave the run directory, keys included."""
    return _tree(value, shareable)


def shareable_values(value: Any) -> Any:
    """Plain data with all its text as it may leave the run directory, but for keys, which are ours:
    pages and programs read it by them."""
    return _tree(value, shareable, names=False)


def shareable_names(numbers: Mapping[str, V]) -> dict[str, V]:
    """Those whose names the rules do not change: environments and reward functions name some. Each
    line has the number and the time of its iteration, whatever rules say."""
    if not _rules:
        return dict(numbers)
    return {name: value for name, value in numbers.items() if name in _LINE or not _changed(name)}


@lru_cache(maxsize=65536)
def _changed(name: str) -> bool:
    return any(hide(name) != name for hide in list(_rules.values()))


def _tree(value: Any, change: Callable[[str], str], names: bool = True) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            _tree(name, change) if names else name: _tree(item, change, names)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_tree(item, change, names) for item in value)
    return value


def redact_error(error: E) -> E | RedactedError:
    """The same exception with its texts, and those of its causes and parts, as they may leave the
    run directory; in the place of one that makes its text of something else, one with the text."""
    return _redacted(error, set())


class RedactedError(EarlError):
    """Stands for an exception whose text cannot be changed."""


def _redacted(error: E, seen: set[int]) -> E | RedactedError:
    if id(error) in seen:
        return error
    seen.add(id(error))
    error.args = tuple(map(_told, error.args))
    if isinstance(error, OSError):
        for name in ("strerror", "filename", "filename2"):
            if isinstance(value := getattr(error, name), str | bytes):
                setattr(error, name, _told(value))
    if isinstance(error, EarlError):
        error.remedy = shareable(error.remedy)
    if hasattr(error, "__notes__"):
        error.__notes__ = [shareable(str(note)) for note in error.__notes__]
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _redacted(part, seen)
    if error.__cause__ is not None:
        error.__cause__ = _redacted(error.__cause__, seen)
    elif error.__context__ is not None:
        error.__context__ = _redacted(error.__context__, seen)
    # Errors of ours are told apart by their classes, and keep them.
    if isinstance(error, EarlError) or (shown := shareable(str(error))) == str(error):
        return error
    return RedactedError(f"{type(error).__name__}: {shown}")


def _told(value: Any) -> Any:
    """An argument of an exception as it may be shown; what is no text stays where its words do."""
    if isinstance(value, str):
        return shareable(value)
    try:
        text = repr(value)
    except Exception:  # code of others
        return HIDDEN
    return value if (shown := shareable(text)) == text else shown


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
    parts, done = [], 0
    for start, end, _ in sorted(secrets_in(text)):
        if end > done:
            # They may overlap: what another one hid is not shown again.
            parts += [text[done:start], HIDDEN] if start >= done else []
            done = end
    return "".join([*parts, text[done:]])


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
    shown = shareable(text)
    if shown != text:
        # Otherwise left alone: some formatters read the arguments.
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        told = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_text = shareable(told)


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


_SHORTEST_FROM_ENVIRONMENT = 8


def environment_secrets() -> dict[str, str]:
    """The variables of this process's environment that hold secrets."""
    # Its bytes: to read all variables takes a hundred times as long, and each line is looked at.
    kept = getattr(os.environ, "_data", os.environ)
    return _secrets_of(tuple(kept.items()))


@lru_cache(maxsize=2)
def _secrets_of(kept: tuple[tuple[object, object], ...]) -> dict[str, str]:
    found = {}
    for name, value in os.environ.items():
        if len(value) < _SHORTEST_FROM_ENVIRONMENT:
            continue
        if is_secret_name(name) and not (value.startswith("/") and os.path.exists(value)):
            found[name] = value
        elif "://" in value and (user := password_of(value)):
            password = user.partition(":")[2]
            if len(password) >= _SHORTEST_FROM_ENVIRONMENT:
                found[name] = password
    return found

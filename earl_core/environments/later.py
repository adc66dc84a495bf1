"""A reward that comes later: a rating by people, or a slow grader's, from files or an endpoint.

Standard library only, because it may run under a Python without our packages. Asked once, it says
what is there; `experience.waiting` asks again until the deadline.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from earl_core.environments.endpoints import open_endpoint, read_reply
from earl_core.environments.real_numbers import checked_number
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.wait import DEADLINE_SECONDS, POLL_SECONDS, Wait

PENDING = "pending"
"""Among the numbers that come with a score: it is none yet."""

NOT_YET = 0.0, {PENDING: 1.0}

_WRITING_SECONDS = 5.0
"""For so long a file may be half written."""
_SHOWN = 300
_BUSY = (429, 500, 502, 503, 504)
_OF_LIMIT = 0.9
"""A look ends before whoever called it gives it up, which would cost the process."""

_told: dict[str, int] = {}
"""The last status of each endpoint, for all objects of the process: 0 where there was no answer."""


class LaterFailed(EarlError):
    """A score that came and is none, or an endpoint that cannot be asked."""

    expected = False


def episode_key(episode: Mapping[str, Any]) -> str:
    """Name an episode by what was said in it: one that is played anew has another name."""
    said = json.dumps([episode["messages"], episode["closing"], episode["scoring"]])
    digest = hashlib.sha256(said.encode()).hexdigest()
    return f"{episode['episode_id']}-{digest[:16]}"


class Later:
    """A score that somebody gives in a while. Each episode has an id.

    directory: where `episodes/ID.json` is written, and `scores/ID.json` is waited for, an object
        with `score`.
    url: URL of an endpoint instead. `GET URL/ID` answers 200 with an object that has `score`, 202
        where there is none yet, and 404 where the episode is not known, which is then sent by
        `POST URL`, an object with `id` and `episode`, and answered with 200 or 202 likewise.
    api_key: bearer token for the endpoint, as a reference.
    deadline_seconds: how long scores are waited for, from when the stage begins.
    poll_seconds: seconds between two looks at what is missing.
    timeout_seconds: time limit of one look, all its requests together; a little less is used.
    """

    def __init__(
        self,
        *,
        directory: str | None = None,
        url: str | None = None,
        api_key: str = "",
        deadline_seconds: float = DEADLINE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        timeout_seconds: float,
    ) -> None:
        if (directory is None) == (url is None):
            raise ConfigError("directory or url is missing, or both are given: give one of them")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}: begin it with http:// or https://")
        if directory is not None and api_key:
            raise ConfigError("api_key is for a url: leave it out")
        Wait.of({"deadline_seconds": deadline_seconds, "poll_seconds": poll_seconds})
        self._directory = None if directory is None else Path(directory)
        self._url, self._key = (url or "").rstrip("/"), api_key
        self._limit = _OF_LIMIT * timeout_seconds

    def __call__(self, episode: Mapping[str, Any]) -> float | tuple[float, Mapping[str, float]]:
        """The score, or `NOT_YET`. Raises `LaterFailed`, and `WireError` for one that is no finite
        number."""
        key = episode_key(episode)
        body = self._asked(key, episode) if self._directory is None else self._looked(key, episode)
        if body is None:
            return NOT_YET
        if not isinstance(body, dict) or "score" not in body:
            raise LaterFailed(
                f"the score of {key} is {body!r:.{_SHOWN}}: give an object with `score`"
            )
        score = body["score"]
        if isinstance(score, bool):
            raise LaterFailed(f"the score of {key} is {score}: give a number")
        return checked_number(f"The score of {key}", score)

    def _looked(self, key: str, episode: Mapping[str, Any]) -> Any:
        assert self._directory is not None
        scored = self._directory / "scores" / f"{key}.json"
        try:
            text, written = scored.read_text(), os.stat(scored).st_mtime
        except FileNotFoundError:
            asked = self._directory / "episodes" / f"{key}.json"
            if not asked.exists():
                scored.parent.mkdir(parents=True, exist_ok=True)
                asked.parent.mkdir(exist_ok=True)
                part = asked.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(dict(episode), indent=1))
                part.replace(asked)
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise LaterFailed(f"{scored} cannot be read: {error}") from None
        try:
            return json.loads(text)
        except ValueError as error:
            if time.time() - written < _WRITING_SECONDS:
                return None
            raise LaterFailed(f"{scored} is no JSON: {error}") from None

    def _asked(self, key: str, episode: Mapping[str, Any]) -> Any:
        over = time.monotonic() + self._limit
        status, body = self._exchange("GET", f"{self._url}/{key}", over)
        if status == 404:
            given = {"id": key, "episode": dict(episode)}
            status, body = self._exchange("POST", self._url, over, given)
        before, _told[self._url] = _told.get(self._url), status
        if status == 202:
            return None
        if status in _BUSY or not status:
            # It may come back before the deadline.
            if status != before:
                told = body.decode(errors="replace")
                sys.stderr.write(f"{self._url}: {status or 'no answer'}: {told}\n")
            return None
        if status != 200:
            raise LaterFailed(f"{self._url} answered with status {status}: {body!r:.{_SHOWN}}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise LaterFailed(f"{self._url} sent no JSON: {body!r:.{_SHOWN}}") from None

    def _exchange(self, method: str, url: str, over: float, given: Any = None) -> tuple[int, bytes]:
        """Status and body; 0 and why where there is no answer. over: when it must end, by the
        monotonic clock."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if given is None else json.dumps(given).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        left = over - time.monotonic()
        if left <= 0:
            return 0, b"too slow"
        try:
            with open_endpoint(request, left) as reply:
                return reply.status, read_reply(reply, max(0.0, over - time.monotonic()))
        except urllib.error.HTTPError as error:
            with error, suppress(OSError, HTTPException):
                return error.code, error.read(_SHOWN)
            return error.code, b""
        except (OSError, HTTPException) as error:
            return 0, str(error).encode()

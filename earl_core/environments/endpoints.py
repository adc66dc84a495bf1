"""Requests to HTTP endpoints that the user names, by the standard library alone."""

from __future__ import annotations

import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 16 << 20
_PIECE = 1 << 16


def is_local(url: str) -> bool:
    """Tell whether the address is of this machine, which no proxy reaches."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def open_endpoint(request: urllib.request.Request, timeout_seconds: float) -> Any:
    """The reply, to be closed. Raises OSError; HTTPError for a redirect, too, because the key in
    the request is for the endpoint that was named."""
    proxies = [urllib.request.ProxyHandler({})] if is_local(request.full_url) else []
    opener = urllib.request.build_opener(_NoRedirects, *proxies)
    return opener.open(request, timeout=timeout_seconds)


def read_reply(reply: Any, timeout_seconds: float) -> bytes:
    """The body of a reply. Raises OSError for one that is too large or, all in all, too slow."""
    over, parts, size = time.monotonic() + timeout_seconds, [], 0
    while part := reply.read1(_PIECE):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise OSError(f"it sends more than {_MOST_BYTES >> 20} MiB")
        if time.monotonic() > over:
            raise TimeoutError(f"it sends for more than {timeout_seconds:g} s")
    return b"".join(parts)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None: ...

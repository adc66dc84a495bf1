"""Requests to HTTP endpoints that the user names, by the standard library alone."""

from __future__ import annotations

import urllib.request
from typing import Any
from urllib.parse import urlsplit


def is_local(url: str) -> bool:
    """Whether it is of this machine, which no proxy reaches."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def open_endpoint(request: urllib.request.Request, timeout_seconds: float) -> Any:
    """The reply, to be closed. Raises OSError; HTTPError for a redirect, too, because the key in
    the request is for the endpoint that was named."""
    proxies = [urllib.request.ProxyHandler({})] if is_local(request.full_url) else []
    opener = urllib.request.build_opener(_NoRedirects, *proxies)
    return opener.open(request, timeout=timeout_seconds)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None: ...

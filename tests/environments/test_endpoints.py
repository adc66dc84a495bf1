"""Requests with a key: where they go, and where they do not."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from earl_core.environments.adapters.openenv_sessions import Remote
from earl_core.environments.endpoints import open_endpoint, read_reply
from earl_core.system.errors import ConfigError


class _Moved(BaseHTTPRequestHandler):
    """Sends all but /here/... to /here."""

    def do_GET(self) -> None:
        moved = not self.path.startswith("/here")
        self.send_response(302 if moved else 200)
        if moved:
            self.send_header("Location", "/here")
        self.end_headers()
        self.wfile.write(json.dumps({"key": self.headers["Authorization"]}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Moved) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_key_follows_no_redirect_and_no_proxy_stands_before_this_machine(url: str) -> None:
    headers = {"Authorization": "Bearer k"}
    with open_endpoint(urllib.request.Request(f"{url}/here", headers=headers), 10.0) as reply:
        assert json.load(reply) == {"key": "Bearer k"}
    with pytest.raises(urllib.error.HTTPError, match="302"):
        open_endpoint(urllib.request.Request(f"{url}/there", headers=headers), 10.0)
    with pytest.raises(ConfigError, match=r"schema of its actions .*302"):
        Remote(url, "k")


class _Endless:
    def read1(self, size: int) -> bytes:
        return b"x" * size


def test_a_reply_has_a_bound_in_size_and_in_time() -> None:
    with pytest.raises(OSError, match="more than 16 MiB"):
        read_reply(_Endless(), 60.0)
    with pytest.raises(TimeoutError, match="for more than 0 s"):
        read_reply(_Endless(), 0.0)

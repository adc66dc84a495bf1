"""Which Prefect server a command uses."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from earl_core.config import ConfigError
from flows import server


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(server, "DEFAULT_URL", "http://127.0.0.1:9/api")


@pytest.fixture
def answering() -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers /api/health with what stands in the list."""
    body = [b"true"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body[0])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/api", body
        httpd.shutdown()


def test_configure_keeps_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "GIT_PYTHON_REFRESH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "DEBUG")
    for name in ("HOME", "SERVER_ANALYTICS_ENABLED", "LOGGING_HANDLERS_CONSOLE_LEVEL"):
        monkeypatch.delenv(f"PREFECT_{name}", raising=False)
    home = server.configure(tmp_path / "runs")
    try:
        assert home == tmp_path / "runs" / "prefect"
        assert home.is_dir()
        assert os.environ["PREFECT_HOME"] == str(home)
        assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        assert os.environ["PREFECT_SERVER_LOGGING_LEVEL"] == "DEBUG"
        monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "mine"))
        assert server.configure(tmp_path / "runs") == tmp_path / "mine"
    finally:
        for name in ("HOME", "SERVER_ANALYTICS_ENABLED", "LOGGING_HANDLERS_CONSOLE_LEVEL"):
            os.environ.pop(f"PREFECT_{name}", None)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"runs_directory '/proc' cannot be written"):
        server.configure("/proc")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"runs_directory .*file.* cannot be written"):
        server.configure(tmp_path / "file" / "runs")
    monkeypatch.setenv("PREFECT_HOME", "/proc/home")
    with pytest.raises(ConfigError, match="PREFECT_HOME '/proc/home' cannot be written"):
        server.configure(tmp_path)


def test_no_server(tmp_path: Path) -> None:
    assert server.running_server(tmp_path) is None


def test_the_default_port_is_used_when_prefect_answers_there(
    tmp_path: Path, answering: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, body = answering
    monkeypatch.setattr(server, "DEFAULT_URL", url)
    assert server.running_server(tmp_path) == url
    body[0] = b"<html>another program</html>"
    assert server.running_server(tmp_path) is None


def test_the_profile_in_the_prefect_home_comes_before_the_default_port(
    tmp_path: Path, answering: tuple[str, list[bytes]]
) -> None:
    url, _ = answering
    profile = f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{url}"\n'
    (tmp_path / "profiles.toml").write_text(profile)
    assert server.running_server(tmp_path) == url


def test_a_server_asked_for_by_name_must_answer(
    tmp_path: Path, answering: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = answering
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert server.running_server(tmp_path) == url
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(server.ServerUnavailable, match="unset PREFECT_API_URL"):
        server.running_server(tmp_path)


def test_a_server_that_ends_at_once_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "home"))
    started = server.start(tmp_path)
    try:
        with pytest.raises(server.ServerUnavailable, match=r"(?s)ended.*Not a directory"):
            started.ready()
    finally:
        started.stop()
        os.environ.pop("PREFECT_API_URL", None)

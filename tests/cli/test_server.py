"""Which Prefect server a command uses."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from websockets import ConnectionClosed, InvalidStatus, Subprotocol
from websockets.sync.client import connect

from earl_core.config import ConfigError
from earl_core.system.identity import trusting
from earl_core.system.processes import ProcessId
from earl_core.system.service import Service, write_services
from flows import server, server_access

pytestmark = pytest.mark.usefixtures("no_settings")


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


CONFIGURED = (
    "HOME", "SERVER_ANALYTICS_ENABLED", "LOGGING_HANDLERS_CONSOLE_LEVEL", "INTERNAL_LOGGING_LEVEL",
    "SERVER_ALLOW_EPHEMERAL_MODE",
)  # fmt: skip


def test_configure_keeps_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "GIT_PYTHON_REFRESH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "DEBUG")
    for name in CONFIGURED:
        monkeypatch.delenv(f"PREFECT_{name}", raising=False)
    home = server.configure(tmp_path / "runs")
    try:
        assert home == tmp_path / "runs" / "prefect"
        assert home.is_dir()
        assert os.environ["PREFECT_HOME"] == str(home)
        assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        assert os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] == "false"
        assert os.environ["PREFECT_SERVER_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["PREFECT_INTERNAL_LOGGING_LEVEL"] == "CRITICAL"
        monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "mine"))
        assert server.configure(tmp_path / "runs") == tmp_path / "mine"
    finally:
        for name in CONFIGURED:
            os.environ.pop(f"PREFECT_{name}", None)


@pytest.mark.parametrize("proxy", ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("excepted", ["", "example.org,10.0.0.0/8", "localhost", "*"])
def test_servers_of_this_machine_are_asked_past_any_proxy(
    tmp_path: Path, proxy: str, excepted: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {proxy: "http://proxy.example:3128", "NO_PROXY": excepted})
        server.configure(tmp_path)
        known = os.environ
    assert known["NO_PROXY"] == known.get("no_proxy", "*")
    hosts = known["NO_PROXY"].split(",")
    assert set(excepted.split(",")) - {""} <= set(hosts)
    assert "*" in hosts or {"127.0.0.1", "localhost"} <= set(hosts)


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
    assert server.running_server(tmp_path, tmp_path) is None


def test_the_default_port_is_used_when_prefect_answers_there(
    tmp_path: Path, answering: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, body = answering
    monkeypatch.setattr(server, "DEFAULT_URL", url)
    assert server.running_server(tmp_path, tmp_path) == (url, None, None, None)
    body[0] = b"<html>another program</html>"
    assert server.running_server(tmp_path, tmp_path) is None


def test_the_profile_in_the_prefect_home_comes_before_the_default_port(
    tmp_path: Path, answering: tuple[str, list[bytes]]
) -> None:
    url, _ = answering
    profile = f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{url}"\n'
    (tmp_path / "profiles.toml").write_text(profile)
    assert server.running_server(tmp_path, tmp_path) == (url, None, None, None)


def test_a_server_asked_for_by_name_must_answer(
    tmp_path: Path, answering: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = answering
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert server.running_server(tmp_path, tmp_path) == (url, None, None, None)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(server.ServerUnavailable, match="unset PREFECT_API_URL"):
        server.running_server(tmp_path, tmp_path)


def test_a_server_that_ends_at_once_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "home"))
    started = server.start(tmp_path, tmp_path)
    try:
        with pytest.raises(server.ServerUnavailable, match=r"(?s)ended.*Not a directory"):
            started.ready()
    finally:
        started.stop()
        os.environ.pop("PREFECT_API_URL", None)
        os.environ.pop("PREFECT_API_AUTH_STRING", None)


NOBODY = """
import encodings.idna, http.server, os
os.setuid(65534)  # the library is not for everybody to read: imported before
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")
with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
    print(httpd.server_port, flush=True)
    httpd.serve_forever()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as somebody else")
def test_a_server_of_another_user_is_used_only_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", NOBODY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as other:
        try:
            assert other.stdout is not None
            url = f"http://127.0.0.1:{int(other.stdout.readline())}/api"
            monkeypatch.setattr(server, "DEFAULT_URL", url)
            assert server_access.healthy(url)
            assert server.running_server(tmp_path, tmp_path) is None
            own = str(ProcessId.current())
            write_services(tmp_path, [Service("prefect", url, "a", "b", own)])
            assert server.running_server(tmp_path, tmp_path) is None
            monkeypatch.setenv("PREFECT_API_URL", url)
            assert server.running_server(tmp_path, tmp_path) == (url, None, None, None)
        finally:
            other.kill()


def test_a_server_of_another_project_at_the_default_port_wants_a_password_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = f"Basic {base64.b64encode(b'earl:word').decode()}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            opened = self.path == "/api/health" or self.headers["Authorization"] == known
            self.send_response(200 if opened else 401)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{httpd.server_port}/api"
        monkeypatch.setattr(server, "DEFAULT_URL", url)
        assert server.running_server(tmp_path, tmp_path) is None
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "earl:word")
        assert server.running_server(tmp_path, tmp_path) == (url, "earl:word", None, None)
        httpd.shutdown()


def test_a_program_that_speaks_another_protocol_is_no_server() -> None:
    with server.listening() as listener:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        assert not server_access.healthy(url, timeout=10)
        with pytest.raises(ConnectionError, match="does not answer as a server does"):
            server_access.Access(url).ask("flows/")
        thread.join(10)


def test_the_prefect_home_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "prefect"
    home.mkdir(parents=True, mode=0o755)
    (home / "prefect.db").touch(mode=0o644)
    (tmp_path / "foreign").touch(mode=0o644)
    (home / "link").symlink_to(tmp_path / "foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ})
        server.configure(tmp_path / "runs")
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "prefect.db").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "foreign").stat().st_mode & 0o777 == 0o644


def answer(
    access: server_access.Access,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    url = f"{access.url.removesuffix('/api')}{path}"
    request = urllib.request.Request(url, None, headers or {}, method=method)
    try:
        with server_access.opener(access.certificate).open(request, timeout=30) as response:
            return response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def test_the_temporary_server_answers_its_user_only(prefect_server: server.Server) -> None:
    access = prefect_server.access
    assert access.auth is not None
    assert access.ask("flow_runs/filter", {"limit": 1}) is not None
    described = access.ask("openapi.json")["paths"]
    paths = [path for path in described if "{" not in path and not path.endswith("/ready")]
    assert len(paths) > 50
    for path in [*(f"/api{path}" for path in paths if path != "/health"), "/", "/docs", "/openapi"]:
        for method in ("GET", "POST"):
            assert answer(access, path, method)[0] == 401, (method, path)
    wrong = base64.b64encode(b"earl:wrong").decode()
    for word in (f"Basic {wrong}", f"Bearer {access.auth}", "Basic", "x"):
        assert answer(access, "/api/flows/filter", "POST", {"Authorization": word})[0] == 401
    with pytest.raises((InvalidStatus, ConnectionClosed)):
        listen_with(access, "wrong")


def listen_with(access: server_access.Access, word: str) -> None:
    """Read from a web socket after its handshake."""
    url, context = (
        f"{access.url.replace('https', 'wss')}/events/out",
        trusting(access.certificate or ""),
    )
    with connect(url, ssl=context, subprotocols=[Subprotocol("prefect")]) as socket:
        socket.send(json.dumps({"type": "auth", "token": word}))
        for _ in range(2):
            socket.recv(timeout=60)


def test_other_sites_get_no_cors_header(prefect_server: server.Server) -> None:
    word = base64.b64encode((prefect_server.access.auth or "").encode()).decode()
    for origin in ("http://other.example", "null", "http://127.0.0.1:4200"):
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Authorization": f"Basic {word}",
        }
        for method, path in (("OPTIONS", "flow_runs/filter"), ("GET", "admin/version")):
            _, headers = answer(prefect_server.access, f"/api/{path}", method, asked)
            assert not [name for name in headers if name.lower().endswith("allow-origin")]


def test_the_password_is_told_to_this_user_only(prefect_server: server.Server) -> None:
    access = prefect_server.access
    home = prefect_server.tell().parent  # type: ignore[union-attr]
    (note,) = home.glob("server-*.env")
    assert server_access.read_access(note) == access
    open_to_others = [path for path in home.rglob("*") if path.stat().st_mode & 0o077]
    assert [path for path in open_to_others if path.is_file()] == []
    word = (access.auth or "").partition(":")[2]
    assert len(word) >= 32
    for process in psutil.process_iter(["cmdline"]):
        assert word not in " ".join(process.info["cmdline"] or ())


def test_every_start_has_a_password_of_its_own(
    tmp_path: Path, prefect_server: server.Server
) -> None:
    (tmp_path / "server-9.pem").touch()  # of one that was killed
    started = server.start_own(tmp_path)
    try:
        assert started.access.auth != prefect_server.access.auth
        note = started.tell()
        assert note is not None
        assert note.exists()
    finally:
        started.stop()
    assert not note.exists()
    assert list(tmp_path.glob("*.pem")) == []

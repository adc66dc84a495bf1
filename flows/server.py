"""Which Prefect server a command uses: one that runs already, or one of its own that ends with it.

Prefect's own temporary server survives a controller that is killed. The one started here hears of
the controller's end through a pipe, in whatever way the controller ends, and goes too. It listens
on loopback only and keeps its database in the project's Prefect home, so that a later
`prefect server start` with the same home shows everything.

Import this module, and call `configure`, before anything imports prefect: Prefect reads its
settings when it is imported.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:4200/api"
"""Where `prefect server start` listens unless told otherwise."""

_PROBE_SECONDS = 1.0
_START_SECONDS = 120.0
_STOP_SECONDS = 5.0


class ServerUnavailable(RuntimeError):
    """No Prefect server can be used; the message says what to change."""


def configure(runs_directory: str | Path) -> Path:
    """Set Prefect's and MLflow's environment for this project; returns the Prefect home.

    What the environment says already is kept: PREFECT_HOME (else `<runs_directory>/prefect`),
    PREFECT_API_URL, logging. Telemetry is off. Prefect's console log is off, for its tracebacks
    repeat what the command reports itself; its interface still shows every log line.

    Raises `ConfigError` when nothing can be written into the runs directory or the Prefect home.
    """
    _make_writable(Path(runs_directory).absolute(), f"runs_directory {str(runs_directory)!r}")
    asked = os.environ.get("PREFECT_HOME")
    home = Path(asked or Path(runs_directory) / "prefect").absolute()
    _make_writable(home, f"PREFECT_HOME {asked!r}" if asked else f"{home} in runs_directory")
    os.environ["PREFECT_HOME"] = str(home)
    for name, value in {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    return home


def _make_writable(directory: Path, name: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Tried, for some file systems allow what permissions say and refuse it all the same.
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = error.strerror or str(error)
    # The temporary server runs this module, too, and has no use for the configuration.
    from earl_core.config.base import ConfigError

    raise ConfigError(
        f"{name} cannot be written into ({why}): choose a folder that you can make and write"
    )


def running_server(home: Path) -> str | None:
    """The API URL of a server to use, None when there is none.

    PREFECT_API_URL, then the active profile in the Prefect home, then the default port.
    Raises `ServerUnavailable` when a server was asked for by name and does not answer.
    """
    asked = os.environ.get("PREFECT_API_URL")
    if asked:
        if not healthy(asked, timeout=5 * _PROBE_SECONDS):
            raise ServerUnavailable(
                f"the Prefect server at PREFECT_API_URL={asked} does not answer: start it with "
                "`prefect server start`, or unset PREFECT_API_URL to use a temporary server"
            )
        return asked
    for url in (_profile_url(home), DEFAULT_URL):
        if url and healthy(url):
            return url
    return None


class Server:
    """A Prefect server in use. Made by `start`; `ready` waits until it answers."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None, log: Path | None) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._stopped = threading.Event()

    @property
    def embedded(self) -> bool:
        """Whether it was started here and ends with this process."""
        return self._process is not None

    @property
    def ended(self) -> bool:
        """Whether it was started here and its process is gone."""
        return self._process is not None and self._process.poll() is not None

    def ready(self, timeout: float = _START_SECONDS) -> None:
        """Wait until the server answers; raises `ServerUnavailable` with the end of its log."""
        deadline = time.monotonic() + timeout
        while not healthy(self.url, timeout=5 * _PROBE_SECONDS):
            ended = self.ended
            if self._stopped.is_set():
                raise ServerUnavailable("the temporary Prefect server was stopped while it started")
            if ended or time.monotonic() > deadline:
                how = "ended" if ended else f"did not answer within {timeout:.0f} s"
                raise ServerUnavailable(
                    f"the temporary Prefect server {how}: look at its log {self._log}, or start "
                    f"one yourself with `prefect server start`.\n{_tail(self._log)}"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server if it was started here."""
        self._stopped.set()
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start(home: Path) -> Server:
    """Use a running server, or start one and return at once; sets PREFECT_API_URL.

    Call `ready` before the first flow: the server starts while this process imports Prefect. Call
    this before importing it, too: the server then ends after Prefect has sent its last events.
    """
    known = running_server(home)
    server = Server(known, None, None) if known else _start_embedded(home)
    atexit.register(server.stop)
    os.environ["PREFECT_API_URL"] = server.url
    return server


def _start_embedded(home: Path) -> Server:
    log = home / "embedded-server.log"
    with socket.socket() as listener, log.open("ab") as output:
        # Bound here and inherited: no other process can take the port in between.
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(),),
            env=_server_environment(),
            # Ctrl-C in the terminal is the controller's to handle; the server ends after it.
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}/api", process, log)


def _server_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root,
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }


def _profile_url(home: Path) -> str | None:
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    profile = profiles.get("profiles", {}).get(profiles.get("active"), {})
    url = profile.get("PREFECT_API_URL") if isinstance(profile, dict) else None
    return url if isinstance(url, str) else None


def healthy(api_url: str, timeout: float = _PROBE_SECONDS) -> bool:
    """Whether a Prefect server answers at this API URL."""
    # Proxies of the environment are for the outside; a server on loopback is not behind one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{api_url.rstrip('/')}/health", timeout=timeout) as response:
            # Anything may listen on the default port; only Prefect answers plain `true`.
            return response.status == 200 and json.loads(response.read(64)) is True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # a server with a password is a server
    except (OSError, ValueError):
        return False


def _tail(log: Path | None, lines: int = 15) -> str:
    try:
        text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One server at a time creates or migrates the database of a home."""
    with (home / "starting.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _serve(descriptor: int) -> None:
    """The temporary server's process: serve on an inherited socket until stdin closes."""
    import uvicorn
    from prefect.server.api.server import create_app

    listener = socket.socket(fileno=descriptor)
    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))

    def watch() -> None:
        while os.read(0, 1):
            pass
        server.should_exit = True
        # Requests that hang must not keep it.
        time.sleep(_STOP_SECONDS - 1)
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    with _alone(Path(os.environ["PREFECT_HOME"])):
        thread.start()
        while thread.is_alive() and not server.started:
            thread.join(0.05)
    thread.join()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

"""Choice of a command's Prefect server: one that is trusted, or its own that ends with it.

A server is trusted that PREFECT_API_URL or a profile of the Prefect home names, one that shows the
certificate of `earl up`'s, or one at the default port whose socket belongs to this user: whoever
else listens could hand this process states and results. A server started here speaks TLS with a key
of its own and wants a password, both made anew at each start, listens on loopback only, answers no
other site's scripts, and keeps its database in the project's Prefect home, where only this user can
read. Prefect's own temporary server is never started. The one started here hears of the
controller's end through a pipe, in whatever way the controller ends, and goes too.

Import this module, and call `configure`, before anything imports prefect: Prefect reads its
settings when it is imported.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.files import refuse_network
from earl_core.system.listeners import is_mine
from earl_core.system.processes import child_path
from earl_core.system.service import Service, living_service
from flows.server_access import (
    DEFAULT_URL,
    PROBE_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    Access,
    ServerWatch,
    is_open,
    named_by_profile,
    read_access,
    write_access,
)


class ServerUnavailable(EarlError):
    """No Prefect server can be used; the message says what to change."""


def configure(runs_directory: str | Path) -> Path:
    """Set Prefect's and MLflow's environment for this project; returns the Prefect home.

    Settings of the environment are kept: PREFECT_HOME (else `<runs_directory>/prefect`),
    PREFECT_API_URL, logging. Telemetry is off. Prefect's console log is off, because its tracebacks
    repeat what the command reports itself; its interface still shows every log line.

    Raises `ConfigError` when nothing can be written into the runs directory or the Prefect home.
    """
    _make_writable(Path(runs_directory).absolute(), f"runs_directory {str(runs_directory)!r}")
    asked = os.environ.get("PREFECT_HOME")
    home = Path(asked or Path(runs_directory) / "prefect").absolute()
    _make_writable(home, f"PREFECT_HOME {asked!r}" if asked else f"{home} in runs_directory")
    if not os.environ.get("PREFECT_API_URL"):
        refuse_network(home / "prefect.db", "set PREFECT_HOME to a folder on a local disk")
    _close_to_others(home)
    os.environ["PREFECT_HOME"] = str(home)
    for name, value in {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # It wants no password, and survives a controller that is killed.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",  # whole events, once the server is gone
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    _ask_loopback_directly()
    return home


def _ask_loopback_directly() -> None:
    """Clients of Prefect and MLflow would ask a proxy for the outside for this machine's, too."""
    names = [f"{kind}_proxy" for kind in ("http", "https", "all")]
    if any(os.environ.get(each) for name in names for each in (name, name.upper())):
        given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if given.strip() != "*":
            hosts = [host.strip() for host in given.split(",") if host.strip()]
            hosts += [host for host in ("127.0.0.1", "localhost") if host not in hosts]
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def _make_writable(directory: Path, name: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Tried, because some file systems allow what permissions say and refuse it all the same.
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = error.strerror or str(error)
    raise ConfigError(
        f"{name} cannot be written into ({why}): choose a folder that you can make and write"
    )


def _close_to_others(home: Path) -> None:
    """The database holds parameters and states of every run, and servers leave passwords there."""
    for path in (home, *home.glob("*")):
        with suppress(OSError):
            known = path.stat(follow_symlinks=False)
            if known.st_uid == os.geteuid() and not path.is_symlink() and known.st_mode & 0o077:
                path.chmod(known.st_mode & 0o700)


def running_server(
    home: Path, runs_directory: str | Path, patience: float = 5 * PROBE_SECONDS
) -> Access | None:
    """A server to use, None when there is none that is trusted.

    The server that PREFECT_API_URL names, then the one that the active profile of the Prefect home
    names, then the server of `earl up`, then one of this user at the default port, if its password
    is known. The server of `earl up` is asked where only it can answer, however it was named.
    patience: seconds to wait for one that was asked for by name. Raises `ServerUnavailable` when a
    server was asked for by name and does not answer.
    """
    asked = os.environ.get("PREFECT_API_URL")
    profile, standing = named_by_profile(home), living_service(runs_directory, "prefect")
    own = access_of(standing) if standing is not None and standing.certificate else None
    if asked:
        named = _named(asked, own, profile)
        if not named.healthy(patience):
            raise ServerUnavailable(
                f"the Prefect server at PREFECT_API_URL={asked} does not answer: start it, or "
                "unset PREFECT_API_URL: `earl up` starts one, other commands a temporary one"
            )
        return named
    if profile is not None:
        named = _named(profile.url, own, profile)
        if named.healthy():
            return named
    # Its process lives, so that it deserves patience: a busy one answers late.
    if own is not None and own.healthy(patience):
        return own
    default = Access(DEFAULT_URL, os.environ.get("PREFECT_API_AUTH_STRING"))
    return default if is_open(default) else None


def access_of(service: Service) -> Access:
    """Return the access to the Prefect server of `earl up`."""
    auth = f"{service.user}:{service.password}"
    return Access(service.secure, auth, service.certificate, service.url.removesuffix("/api"))


def _named(url: str, own: Access | None, profile: Access | None) -> Access:
    """The server at an address that somebody gave; how to get in, as far as that is known."""
    given = url.rstrip("/")
    if own is not None and given in (own.url, f"{own.site}/api"):
        return own
    known = profile if profile and profile.url.rstrip("/") == given else Access(url)
    auth, certificate = (
        os.environ.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "SSL_CERT_FILE")
    )
    return Access(url, auth or known.auth, certificate or known.certificate)


class Server:
    """A Prefect server in use. Made by `start`; `ready` waits until it answers."""

    def __init__(
        self, access: Access, process: subprocess.Popen[bytes] | None = None, home: Path = Path()
    ) -> None:
        self.access = access
        self.url = access.url
        self._process = process
        self._log = home / "embedded-server.log"
        self._note = home / f"server-{process.pid}.env" if process else None
        self._stopped = threading.Event()

    @property
    def embedded(self) -> bool:
        """True when the server was started here and ends with this process."""
        return self._process is not None

    @property
    def ended(self) -> bool:
        """True when the server was started here and its process is gone."""
        return self._process is not None and self._process.poll() is not None

    def watch(self) -> ServerWatch:
        """Notice from now on that it is lost."""
        return ServerWatch(self.access, self._process)

    def ready(self) -> None:
        """Wait until the server answers; raises `ServerUnavailable` with the end of its log."""
        deadline = time.monotonic() + START_SECONDS
        while not self.access.healthy(5 * PROBE_SECONDS):
            ended = self.ended
            if self._stopped.is_set():
                raise ServerUnavailable("the temporary Prefect server was stopped while it started")
            if ended or time.monotonic() > deadline:
                how = "ended" if ended else f"did not answer within {START_SECONDS:.0f} s"
                raise ServerUnavailable(
                    f"the temporary Prefect server {how}: look at its log {self._log}, or start "
                    f"one with `earl up`.\n{tail(self._log)}"
                )
            time.sleep(0.1)

    def tell(self) -> Path | None:
        """Leave address and password where this user finds them, until the server is stopped; None
        for a server of somebody else."""
        if self._note is not None:
            write_access(self._note, self.access)
        return self._note

    def stop(self) -> None:
        """End the server if it was started here."""
        self._stopped.set()
        process, self._process = self._process, None
        if process is None:
            return
        if self._note is not None and read_access(self._note) == self.access:
            self._note.unlink(missing_ok=True)
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self.access.certificate is not None:
            Path(self.access.certificate).unlink(missing_ok=True)


def start(home: Path, runs_directory: str | Path) -> Server:
    """Use a running server, or start one and return at once; sets PREFECT_API_URL.

    Call `ready` before the first flow: the server starts while this process imports Prefect. Call
    this before importing it, too: the server then ends after Prefect has sent its last events.
    """
    known = running_server(home, runs_directory)
    server = Server(known) if known else start_own(home)
    atexit.register(server.stop)
    os.environ |= server.access.environment()
    server.tell()
    return server


def start_own(home: Path) -> Server:
    """Start a server without pages that ends with this process; returns at once."""
    _forget_dead(home)
    log = os.open(home / "embedded-server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with listening() as listener:
            port = listener.getsockname()[1]
            access = Access(
                f"https://127.0.0.1:{port}/api",
                f"earl:{secrets.token_urlsafe(24)}",
                str(home / f"server-{port}.pem"),
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.server_process", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                # The password is not on the command line: the environment is this user's to read.
                env=server_environment(home, access),
                umask=0o077,
                # Ctrl-C in the terminal is the controller's to handle; the server ends after it.
                start_new_session=True,
            )
    finally:
        os.close(log)
    return Server(access, process, home)


def listening(port: int = 0) -> socket.socket:
    """A socket that listens on loopback, for a child to inherit: no other process can take its
    port in between. port: 0 for any that is free. Raises `OSError` when it is taken."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def server_environment(home: Path, access: Access) -> dict[str, str]:
    """Return the environment of a server's process: with the web interface and the services that
    deployments need, if it has pages."""
    site = access.site
    sites = site, site.replace("127.0.0.1", "localhost")
    kind = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    return {
        **os.environ,
        **({"PREFECT_UI_ENABLED": "1"} if access.pages else kind),
        "PYTHONPATH": child_path(os.environ),
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_SERVER_API_AUTH_STRING": access.auth or "",
        **access.environment(),
        "PREFECT_UI_URL": site,
        "PREFECT_UI_API_URL": f"{site}/api",
        # Three quarters of what the database grows by; flow runs, tasks and logs do not need it.
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "pages"),
        # By default any web page in this user's browser may read runs and set states.
        # Its own may: under both names, for a browser behind a tunnel is at localhost.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(sites),
    }


def _forget_dead(home: Path) -> None:
    """Remove what temporary servers left whose controller was killed."""
    for note in home.glob("server-*.env"):
        left = read_access(note)
        if left is not None and not is_mine(left.url):
            note.unlink(missing_ok=True)
    for certificate in home.glob("server-*.pem"):
        port = certificate.stem.removeprefix("server-")
        # One that has just begun to listen is about to write it.
        if port.isdigit() and not is_mine(f"https://127.0.0.1:{port}"):
            certificate.unlink(missing_ok=True)


_TAIL_LINES = 15


def tail(log: Path) -> str:
    """The end of a log, each line with the sign of a quotation."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in text.splitlines()[-_TAIL_LINES:])

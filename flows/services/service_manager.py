"""All services of a runs directory together: what is missing is started, what was started ended.

Only one command at a time does either. Another server that is named (PREFECT_API_URL, a profile of
the Prefect home, MLFLOW_TRACKING_URI) is used, and neither started nor ended.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from earl_core.secrets import learn
from earl_core.system.errors import ConfigError
from earl_core.system.files import FileLock, make_directory, refuse_network, write_atomic
from earl_core.system.listeners import is_mine, strangers_at
from earl_core.system.processes import child_path
from earl_core.system.service import (
    Service,
    directories_with_services,
    read_services,
    services_directory,
    write_services,
)
from flows.deployments import deploy, import_flows
from flows.server import (
    ServerUnavailable,
    access_of,
    configure,
    listening,
    running_server,
    server_environment,
)
from flows.server_access import PROBE_SECONDS, START_SECONDS, Access, named_by_profile
from flows.services.process import end, mlflow_answers, spawn, until
from flows.services.worker import reports, start_worker, stop_flow_runs
from tasks.tracking.mlflow_client import default_database
from tasks.tracking.mlflow_process import environment as mlflow_environment
from tasks.tracking.served import CERTIFICATE

LOGIN = "login.env"
"""The file with addresses and passwords for shells and people."""

USER = "earl"
_PORTS = {"prefect": 4200, "mlflow": 5000}
_OPTIONS = {"prefect": "--port", "mlflow": "--mlflow-port"}
_PATHS = {"prefect": "/api", "mlflow": ""}
_WAIT_SECONDS = 2 * START_SECONDS

Say = Callable[[str], None]


class Outside(NamedTuple):
    """Servers that somebody else runs, where they were named."""

    prefect: Access | None
    mlflow: str | None


class ServiceManager:
    """The services of a runs directory. Made for one command; `up` or `down` do it all."""

    def __init__(self, runs_directory: str) -> None:
        self.runs_directory = runs_directory
        self.home = Path()
        """Prefect's, once it is needed."""
        self.services: dict[str, Service] = {}
        self.started: list[str] = []
        """The services that `up` has started, by name."""

    @property
    def login(self) -> Path:
        """The file with addresses and passwords."""
        return services_directory(self.runs_directory) / LOGIN

    def up(self, ports: dict[str, int | None], say: Say) -> Outside:
        """Start what is missing and wait until it answers.

        ports: of the servers, by name; None for the one it had. say: hears what goes on. A failure
        ends what was started here. Raises `ConfigError` for a port in use and `ServiceFailed`.
        """
        self.home = configure(self.runs_directory)
        with self._alone():
            self.services = read_services(self.runs_directory)
            outside = self._outside()
            database = default_database(self.runs_directory)
            if outside.mlflow is None:
                refuse_network(database, "choose another --runs-directory")
            try:
                self._start(outside, ports, say)
            except BaseException:
                for name in reversed(self.started):
                    self._end(name)
                raise
        return outside

    def _start(self, outside: Outside, ports: dict[str, int | None], say: Say) -> None:
        wanted = [name for name, other in zip(_PORTS, outside, strict=True) if other is None]
        missing = [name for name in wanted if not self._proven(name)]
        listeners = {name: self._listen(name, ports[name]) for name in missing}
        if "prefect" in missing:
            self._end("worker")  # it would ask the old server, with its password
        for name, (secure, pages) in listeners.items():
            with secure, pages:
                self._start_server(name, secure, pages)
        if missing:
            say("starting the servers; Prefect needs 10 to 20 s")
            import_flows()
        access = outside.prefect or access_of(self.services["prefect"])
        if outside.prefect is None:
            self._wait("prefect", access.healthy)
        say("deploying train, iteration, evaluate, profile")
        if self._alive("worker") and self.services["worker"].secure != access.url:
            say("ending the worker, which asks another server")
            self._end("worker")
        # Flow runs of a worker that goes on work where it was started.
        self._deploy(access, None if self._alive("worker") else Path.cwd())
        if not self._alive("worker"):
            mark = self.services.get("worker", Service("worker")).mark
            server = self.services["prefect"].process if outside.prefect is None else ""
            self._note(start_worker(self.runs_directory, self.home, access, mark, server))
        if outside.mlflow is None:
            self._wait("mlflow", lambda: mlflow_answers(self.services["mlflow"]))
        self._wait("worker", lambda: reports(access, self.services["worker"]))
        self._write_login(outside)

    def _deploy(self, access: Access, directory: Path | None) -> None:
        try:
            deploy(access, self.runs_directory, directory)
        except (OSError, ValueError) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403)
            remedy = (
                "set PREFECT_API_AUTH_STRING to its password"
                if refused
                else "look at its log, and run `earl up` again"
            )
            raise ServerUnavailable(
                f"the Prefect server at {access.url} takes no deployments ({error}): {remedy}"
            ) from error

    def down(self, say: Say) -> list[str]:
        """End what `up` started; the names of the services that were ended."""
        if not services_directory(self.runs_directory).is_dir():
            return []
        self.home = configure(self.runs_directory)
        with self._alone():
            self.services = read_services(self.runs_directory)
            order = ("worker", "mlflow", "prefect")
            there = [name for name in order if self._is_there(name)]
            worker = self.services.get("worker")
            if worker is not None and "worker" in there:
                access = self._server_of(worker)
                if access is not None:
                    stop_flow_runs(access, worker, say)
            for name in order:
                self._end(name)
            self.login.unlink(missing_ok=True)
            return there

    def _server_of(self, worker: Service) -> Access | None:
        """The worker's server, whatever this shell's settings name; None without an answer."""
        own = self.services.get("prefect")
        if own is not None and own.secure == worker.secure:
            access = access_of(own)
            return access if own.alive and access.healthy(5 * PROBE_SECONDS) else None
        with suppress(ServerUnavailable):
            found = running_server(self.home, self.runs_directory)
            if found is not None and found.url == worker.secure:
                return found
        return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        state = services_directory(self.runs_directory)
        make_directory(state, 0o700)
        try:
            lock = FileLock(state / "lock", _WAIT_SECONDS)
        except BlockingIOError:
            raise ConfigError(
                f"another `earl up` or `earl down` works on {state}: wait until it is done"
            ) from None
        with lock:
            yield

    def _outside(self) -> Outside:
        # Where ours has ended, another of this user's may answer by now.
        own = {
            address
            for name in _PORTS
            if (service := self.services.get(name)) is not None
            for address in (service.url, service.secure)
            if address and (service.alive or not is_mine(address))
        }
        prefect = mlflow = None
        asked = os.environ.get("PREFECT_API_URL", "").rstrip("/")
        if asked and asked not in own:
            prefect = running_server(self.home, self.runs_directory)
        elif not asked:
            profile = named_by_profile(self.home)
            other = profile is not None and profile.url.rstrip("/") not in own
            prefect = profile if profile is not None and other and profile.healthy() else None
        asked = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        if asked and asked not in own:
            mlflow = asked
        return Outside(prefect, mlflow)

    def _alive(self, name: str) -> bool:
        return name in self.services and self.services[name].alive

    def _proven(self, name: str) -> bool:
        """Tell whether a server runs that clients can tell from others."""
        return self._alive(name) and bool(self.services[name].certificate)

    def _is_there(self, name: str) -> bool:
        return name in self.services and bool(self.services[name].processes())

    def _listen(self, name: str, port: int | None) -> tuple[socket.socket, socket.socket]:
        """Sockets for programs and for browsers. port: the browsers'."""
        known = self.services.get(name) or Service(name)
        end(known)  # what a server left that was killed
        port = port or urlsplit(known.url).port or _PORTS[name]
        try:
            pages = listening(port)
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be listened on ({error.strerror}{_listening_at(port)}): "
                f"choose another with {_OPTIONS[name]}"
            ) from None
        # Nobody types this one; the last one's is kept for whoever wrote it down.
        with suppress(OSError):
            return listening(urlsplit(known.secure).port or 0), pages
        return listening(), pages

    def _start_server(self, name: str, secure: socket.socket, pages: socket.socket) -> None:
        known = self.services.get(name) or Service(name)
        state = services_directory(self.runs_directory)
        ports = [each.getsockname()[1] for each in (secure, pages)]
        service = replace(
            known,
            url=f"http://127.0.0.1:{ports[1]}{_PATHS[name]}",
            user=USER,
            password=secrets.token_urlsafe(24),
            secure=f"https://127.0.0.1:{ports[0]}{_PATHS[name]}",
            certificate=str(state / f"{name}.pem"),
        )
        learn(service.password)
        if name == "prefect":
            command, last = ["-m", "flows.server_process"], [str(state.parent)]
            environment = server_environment(self.home, access_of(service))
        else:
            command, last = ["-m", "tasks.tracking.mlflow_process"], []
            environment = {**os.environ, "PYTHONPATH": child_path(os.environ)}
            environment |= mlflow_environment(
                state, default_database(self.runs_directory), ports, service
            )
        listeners = secure.fileno(), pages.fileno()
        command += [",".join(map(str, listeners)), *last]
        self._note(spawn(self.runs_directory, service, command, environment, listeners))

    def _wait(self, name: str, answers: Callable[[], bool]) -> None:
        until(answers, self.services[name], self.runs_directory, START_SECONDS)

    def _note(self, service: Service) -> None:
        """Remember a service that was started, before anything else can fail."""
        self.started.append(service.name)
        self.services[service.name] = service
        write_services(self.runs_directory, self.services.values())

    def _end(self, name: str) -> None:
        if name in self.services:
            end(self.services[name])
            self.services[name] = self.services[name].ended()
            write_services(self.runs_directory, self.services.values())

    def _write_login(self, outside: Outside) -> None:
        variables: dict[str, str] = {}
        if outside.prefect is None:
            variables |= access_of(self.services["prefect"]).environment()
        if outside.mlflow is None:
            mlflow = self.services["mlflow"]
            variables |= {
                "MLFLOW_TRACKING_URI": mlflow.secure,
                "MLFLOW_TRACKING_USERNAME": mlflow.user,
                "MLFLOW_TRACKING_PASSWORD": mlflow.password,
                CERTIFICATE: mlflow.certificate,
            }
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
        write_atomic(self.login, "".join(lines).encode())


def _listening_at(port: int) -> str:
    """Name the owner of a port, as far as that can be told."""
    for directory in directories_with_services():
        ports = [
            urlsplit(each.url).port for each in read_services(directory).values() if each.alive
        ]
        if port in ports:
            return f"; `earl up` for {directory} listens there, and every `earl` uses it"
    return "".join(f"; the user {other} listens there" for other in strangers_at(port))

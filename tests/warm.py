"""Programs of tests in processes forked from one that has imported what they import.

Importing Prefect, torch and transformers takes a controller and the process that its ranks are
forked from eight seconds of a core; training the tests' model takes them less than four. They start
here as they start alone (own session, environment, directory, standard streams; killed and awaited
as `subprocess.Popen`'s), but with these imports done. A program whose start is what a test looks at
is started by `subprocess`.

`python -m tests.warm PID FD MODULE...`: imports the modules; then, while the process PID lives,
each request on the socket FD forks a process. What `start` forks from is shared by the two workers
of a session; what `run` forks from is not, because tests look below their own process.
"""

from __future__ import annotations

import atexit
import errno
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import psutil

from earl_core.cluster import fork_server
from tests.shared import session_process

ROOT = Path(__file__).resolve().parents[1]
_MESSAGE = 1 << 20
_RANKS = "earl_core.cluster.fork_server"
_RANK_MODULES = (
    "earl_core.rollout.rollout_worker",
    "earl_core.experience.experience_worker",
    "earl_core.learner.update_worker",
)
CONTROLLER = ("flows.train",)
"""What a controller imports."""

LEARNER = _RANK_MODULES[-1:]
"""What trains."""

ALL = (*CONTROLLER, *_RANK_MODULES)
"""What a controller imports whose ranks are in its own process."""

COMMAND = ("flows.cli.app", "flows.cli.training", "flows.cli.doctor", "flows.cli.environments")
"""What commands import before they know what they do, for `run`."""

_OWN = (
    *("EARL_", "XDG_STATE_HOME", "PYTEST_", "PYTHONPATH", "MLFLOW_", "VLLM_", "TORCHINDUCTOR_"),
    *("AITER_", "CUBLAS_", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "NUMEXPR_", "RAY_CLIENT_"),
)
"""Variables that imports do not read: they may differ from those of the process forked from. Many
are set by libraries in whatever test process has imported them."""

_SERVERS = ("PREFECT_",)
"""Variables that imports of ranks and of `COMMAND` do not read either."""


class Started:
    """A forked process, with what tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self.pid = int(connection.recv(_MESSAGE))

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def _read(self) -> None:
        self.returncode = int(self._connection.recv(_MESSAGE) or -signal.SIGKILL)
        self._connection.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ask(address: str, request: dict[str, Any], descriptors: Sequence[int]) -> Started:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + 10
    while True:
        try:
            connection.connect("\0" + address)
            break
        except ConnectionRefusedError:
            # Another worker has bound it, and listens in a moment.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
    return Started(connection)


@cache
def _importing(
    modules: tuple[str, ...], environment: tuple[tuple[str, str], ...], owner: int
) -> str:
    """The address of a process that imports these, then forks; it ends with the process `owner`."""
    wanted = hashlib.sha256(repr((modules, environment)).encode()).hexdigest()[:16]
    address = f"earl-tests-{owner}-{wanted}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind("\0" + address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return address
        listener.listen(64)
        numbers = str(owner), str(listener.fileno())
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.warm", *numbers, *modules],
            cwd=ROOT,
            env={**dict(environment), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
    return address


def _read_by_imports(
    environment: Mapping[str, str], besides: tuple[str, ...] = ()
) -> tuple[tuple[str, str], ...]:
    not_read = _OWN + besides
    return tuple(sorted(pair for pair in environment.items() if not pair[0].startswith(not_read)))


def _ranks(owner: int) -> str:
    # As the process that it stands for is started.
    environment = _read_by_imports(fork_server._environment(), _SERVERS)
    return _importing(_RANK_MODULES, environment, owner)


def run(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    text: str,
    timeout: float,
    ranks: bool,
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` to its end, for a module that imports `COMMAND`.

    text: its standard input. ranks: it may start some. Raises `subprocess.TimeoutExpired` after
    timeout seconds, the process killed.
    """
    request = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": str(directory),
        "streams": [0, 1, 2],
    }
    if ranks:
        request["ranks"] = _ranks(os.getpid())
    address = _importing(COMMAND, _read_by_imports(environment, _SERVERS), os.getpid())
    with ExitStack() as stack:
        streams = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        streams[0].write(text)
        streams[0].seek(0)
        started = _ask(address, request, [stream.fileno() for stream in streams])
        try:
            code = started.wait(timeout)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
            raise
        shown = []
        for stream in streams[1:]:
            stream.seek(0)
            shown.append(stream.read())
    return subprocess.CompletedProcess([module, *arguments], code, *shown)


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    output: int,
    imports: Sequence[str] = CONTROLLER,
) -> Started:
    """`python -m MODULE ARGUMENTS`, in a session of its own.

    output: where its standard output and error go. imports: modules that it needs.
    """
    request: dict[str, Any] = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": str(directory),
        "streams": [1],
    }
    if CONTROLLER[0] in imports:
        request["ranks"] = _ranks(session_process())
    address = _importing(tuple(imports), _read_by_imports(environment), session_process())
    return _ask(address, request, [output])


# In the process forked from


def _serve(listener: socket.socket, owner: int) -> None:
    """Until the process with this descriptor has ended."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([owner, listener, *running], [], [])
        if owner in ready:
            return
        for descriptor in ready:
            if descriptor is listener:
                _fork(listener, running, owner)
                continue
            pid, connection = running.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            with connection, suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _fork(
    listener: socket.socket, running: dict[int, tuple[int, socket.socket]], owner: int
) -> None:
    connection, _ = listener.accept()
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if int.from_bytes(peer[4:8], sys.byteorder) != os.getuid():
        # Anybody on this machine can connect.
        connection.close()
        return
    data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 8)
    pid = os.fork()
    if pid == 0:
        listener.close()
        connection.close()
        os.close(owner)
        for descriptor, (_, other) in running.items():
            os.close(descriptor)
            other.close()
        _become(json.loads(data), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    running[os.pidfd_open(pid)] = pid, connection
    connection.send(str(pid).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In the forked process: what `exec` would have done, then the program to its end."""
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    streams = request["streams"]
    given, others = descriptors[: len(streams)], descriptors[len(streams) :]
    for stream, descriptor in zip(streams, given, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if 2 not in streams:
        os.dup2(1, 2)
    for descriptor in others:
        os.set_inheritable(descriptor, True)
    sys.argv = [request["module"], *request["arguments"], *map(str, others)]
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*found, *(path for path in sys.path if path not in found)]
    if request["module"] == _RANKS:
        _answer_for(request["parent"])
    else:
        sys.path.insert(0, request["directory"])
        if "ranks" in request:
            ranks_from(request["ranks"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    _leave(int(code or 0))


def _leave(code: int) -> None:
    """As an interpreter ends: other threads are awaited, exit functions run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answer_for(controller: int) -> None:
    """This process ends with its controller, whose child it would be."""
    own = os.getppid
    os.getppid = lambda: controller if psutil.pid_exists(controller) else 1
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", own))


def ranks_from(address: str) -> None:
    """Have this process's ranks forked from a process that has imported already."""

    def popen(command: list[str], **options: Any) -> Started:
        assert _RANKS in command
        request = {
            "module": _RANKS,
            "arguments": [],
            "environment": options["env"],
            "directory": os.getcwd(),
            "streams": [1],
            "parent": os.getpid(),
        }
        return _ask(address, request, [options["stdout"].fileno(), *options["pass_fds"]])

    names = ("DEVNULL", "STDOUT", "TimeoutExpired")
    kept = {name: getattr(subprocess, name) for name in names}
    fork_server.subprocess = SimpleNamespace(Popen=popen, **kept)  # type: ignore[assignment]


def main(owner: int, descriptor: int, modules: Sequence[str]) -> None:
    """Import, then fork for whoever asks."""
    lives = os.pidfd_open(owner)
    from setproctitle import getproctitle

    # Finds the place of the title, while the environment is still that of the start.
    getproctitle()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as listener:
        _serve(listener, lives)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

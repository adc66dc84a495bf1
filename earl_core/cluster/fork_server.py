"""The process that supervisors and ranks are forked from.

Importing torch and transformers takes each process seconds of a core. This process imports each
module of a worker once for its controller, when the first rank needs it or `preload` asks for it;
every supervisor is forked from it, and every rank from its supervisor, within milliseconds. It has
one thread and starts no other, so that a fork copies a state that nobody is in the middle of
changing, and it never touches a GPU. It ends when the controller does, whose end of the connection
closes in whatever way that happens. Should it end before, the ranks that it forked live on, and the
next one is forked from another.

Started as `python -m earl_core.cluster.fork_server FD`; each request and each answer is one JSON
message on a socket that keeps messages apart, with the descriptors that a new process inherits.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from earl_core.system.plain_paths import plain
from earl_core.system.processes import Process, child_path, inspect, send_signal, still

_OURS = "earl_core."
"""Only modules of ours are imported here: code of others may start threads or touch a GPU."""

NATIVE_RUNTIMES = {
    "GOMP_SPINCOUNT": "6000",
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
}
"""Variables that the runtimes of OpenMP and of C read when a process starts.

GOMP_SPINCOUNT: how long threads spin at a barrier before they sleep. On two cores an update beside
one busy process takes 2.7 times as long with 6,000, ten times with 100,000; alone, 3,000 cost an
eighth and 6,000 nothing. hugetlb: with pages of 2 MiB an update that needs new memory has 5,000
page faults instead of 750,000, which in a virtual machine cost seconds.
"""

_ANSWER_SECONDS = 300.0
"""It may be importing before it answers."""
_LOOK_SECONDS = 0.5
_MESSAGE = 1 << 20
_MOST_DESCRIPTORS = 8


class SupervisorHandle:
    """A forked supervisor, as the controller sees it; pids are told apart by their start times."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._process = inspect(pid)

    def _running(self) -> bool:
        return self._process is not None and still(self._process) is not None

    def kill(self) -> None:
        """Harmless when it is gone."""
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the process; true if it ends within this time. An unreaped one has ended."""
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not running

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs, or when nobody knows."""
        return self._server.exit_code(self.pid)


class ForkServer:
    """The controller's end; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preloaded: set[str] = set()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this object lives)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "earl_core.cluster.fork_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def preload(self, *modules: str) -> None:
        """Have modules of ours imported before a rank needs them; returns at once."""
        wanted = set(modules) - self._preloaded
        self._preloaded |= wanted
        if wanted:
            self._ask({"preload": sorted(wanted)})

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> SupervisorHandle:
        """Fork a supervisor.

        module: that of the rank's target. descriptors: its log, then those of `Supervisor`. Raises
        `ConnectionError` when the server ended or did not answer in time, and another `OSError`
        when the host allows no more processes.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": os.getcwd(),
        }
        answer = self._ask(request, descriptors)
        if "errno" in answer:
            number = int(answer["errno"])
            raise OSError(number, f"no process can be forked: {os.strerror(number)}")
        return SupervisorHandle(self, int(answer["pid"]))

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a supervisor that ended; None while it lives, or this server is gone."""
        with suppress(ConnectionError):
            code = self._ask({"wait": pid})["code"]
            return None if code is None else int(code)
        return None

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                ready, _, _ = select.select([self._socket], [], [], _ANSWER_SECONDS)
                answer = self._socket.recv(_MESSAGE) if ready else b""
            except OSError as error:
                raise ConnectionError(self._ended()) from error
            if not answer:
                raise ConnectionError(self._ended())
        found: dict[str, Any] = json.loads(answer)
        return found

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.stop()
        self._log.seek(0)
        text = self._log.read()[-2000:].decode(errors="replace").strip()
        return (
            f"the process that ranks are forked from ended with code {self._process.returncode}"
            + (f": {text}" if text else "")
        )

    def stop(self) -> None:
        """End it; what it forked lives on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": child_path(os.environ),
        **plain_temporary(),
        # Threads of a library that starts them on import would be missing in a forked process.
        "OPENBLAS_NUM_THREADS": "1",
        **NATIVE_RUNTIMES,
        # Asking CUDA itself how many devices there are would make it unusable after a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # A title that is written over the environment hides it from `ps e` and from our tests.
        "SPT_NOENV": "1",
    }


def plain_temporary() -> dict[str, str]:
    """Return the variable that names the folder where the processes of ranks keep temporary files,
    sockets and the output of torch's compiler."""
    return {"TMPDIR": str(plain(Path(tempfile.gettempdir()), short=True))}


_server: ForkServer | None = None
_guard = threading.Lock()


def fork_server() -> ForkServer:
    """This process's server, started when there is none. Returns before its imports are done."""
    global _server
    with _guard:
        if _server is None or not _server.alive:
            _server = ForkServer()
        return _server


def _forget_after_fork() -> None:
    global _server
    if _server is not None:
        # Or the controller's death would go unseen.
        with suppress(OSError):
            os.close(_server._socket.detach())
    _server = None


os.register_at_fork(after_in_child=_forget_after_fork)


# The server's side


def _load(modules: Iterable[str]) -> None:
    wanted = [name for name in modules if name.startswith(_OURS) and name not in sys.modules]
    # The end of the connection is not seen meanwhile.
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    for name in wanted:
        # A rank that needs what is missing here imports it itself, and says why it cannot.
        with suppress(Exception):
            importlib.import_module(name)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if wanted:
        # A collection would write into what is shared with the forked processes.
        gc.collect()
        gc.freeze()


def _serve(connection: socket.socket, controller: Process | None) -> None:
    codes: dict[int, int] = {}
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, _MOST_DESCRIPTORS)
        except OSError:
            return
        if not data:
            return
        request = json.loads(data)
        _reap(codes)
        if "wait" in request:
            answer = {"code": codes.get(request["wait"])}
        elif "preload" in request:
            answer = {}
        else:
            _load([request["module"]])
            answer = _fork(connection, request, descriptors, controller)
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            connection.send(json.dumps(answer).encode())
        except OSError:
            return
        _load(request.get("preload", ()))


def _fork(
    connection: socket.socket,
    request: dict[str, Any],
    descriptors: list[int],
    controller: Process | None,
) -> dict[str, Any]:
    try:
        pid = os.fork()
    except OSError as error:
        return {"errno": error.errno}
    if pid == 0:
        connection.close()
        _become_supervisor(request, descriptors, controller)
    return {"pid": pid}


def _reap(codes: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            codes[pid] = os.waitstatus_to_exitcode(status)


def _become_supervisor(
    request: dict[str, Any], descriptors: list[int], controller: Process | None
) -> None:
    """Do in the forked process what `exec` would have done, then run the supervisor to the end."""
    from earl_core.cluster import supervisor

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    log, *connections = descriptors
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    for descriptor in connections:
        os.set_inheritable(descriptor, False)
    supervisor.main(connections, controller, *request["arguments"])
    sys.exit(0)


def main(descriptor: int) -> None:
    """Serve the controller at the other end of the connection; see the module's docstring."""
    from setproctitle import setproctitle  # not where no ranks are started

    setproctitle("earl_core.cluster.fork_server")
    controller = os.getppid()

    def look(number: int, frame: object) -> None:
        if os.getppid() != controller:
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    with socket.socket(fileno=descriptor) as connection:
        _serve(connection, inspect(controller))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(int(sys.argv[1]))

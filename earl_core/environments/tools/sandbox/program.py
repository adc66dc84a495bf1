"""Runs the code of its standard input where it does no harm, and prints what it prints.

    python -I -c "…program.main()" SETTINGS

SETTINGS is the JSON of `Settings`. This process stays outside and watches; a child of it is cut off
and, in namespaces, has the code's process as a child of its own. Exit code `REFUSED`: the limits
that were asked for cannot be had here, the last line says why.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from earl_core.environments.tools.sandbox import filters, kernel, view

REFUSED = 126
_INNER_USER = 1000
_FIRST_FREE_USER = 0x70000000
_NOBODY = 65534
_PERIOD = 0.05
_LOOK_SHARE = 0.2
_FILE_BYTES, _OPEN_FILES = 1 << 24, 64
_COUNTED_PER_NAMESPACE = (5, 14)
_SPACES = (
    kernel.NEW_MOUNTS
    | kernel.NEW_CGROUPS
    | kernel.NEW_NAMES
    | kernel.NEW_IPC
    | kernel.NEW_PROCESSES
    | kernel.NEW_NETWORK
)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Settings:
    """namespaces: whether the code gets some, else filters alone. folder: an empty one. groups:
    directories of control groups that have the limits. seconds: of processor and wall time. memory:
    bytes of each process and of all together. tell: print first, as JSON, what is not held."""

    namespaces: bool
    folder: str
    groups: list[str]
    seconds: int
    memory: int
    processes: int
    tell: bool = False

    def text(self) -> str:
        """Write the settings as the program takes them."""
        return json.dumps(asdict(self))


def main() -> None:
    """Returns in the code's process only, when the code is over."""
    settings = Settings(**json.loads(sys.argv[1]))
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    watched = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    kernel.die_with_parent(signal.SIGTERM)
    kernel.adopt_orphans()
    outside = os.getpid()
    worker = os.fork()
    if worker:
        _watch(settings, worker, watched)
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != outside:
        os._exit(REFUSED)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    try:
        lacking = _in_namespaces(settings) if settings.namespaces else _filtered(settings)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(REFUSED)
    if settings.tell:
        print(json.dumps(lacking), flush=True)
    _run(code)


def _watch(settings: Settings, worker: int, watched: set[signal.Signals]) -> NoReturn:
    """Watch the worker until it ends or has to."""
    deadline = time.monotonic() + settings.seconds
    period, why, code = _PERIOD, "", None
    while not why and code is None:
        got = signal.sigtimedwait(watched, period)
        if got is not None and got.si_signo == signal.SIGTERM:
            why = "it was told to end"
        code = _ended(worker)
        if time.monotonic() > deadline:
            why = why or f"the code ran for over {settings.seconds} s"
        elif code is None and not settings.groups:
            began = time.monotonic()
            why = why or _too_much(settings)
            period = max(_PERIOD, (time.monotonic() - began) / _LOOK_SHARE)
    end_all()
    if code is not None and code > 128 and not why:
        name = signal.Signals(code - 128).name
        why = f"the code was ended by {name}"
        if code - 128 == signal.SIGKILL and settings.groups:
            why += f": all its processes may use {settings.memory >> 20} MiB together"
        elif code - 128 == signal.SIGXCPU:
            why = f"the code ran for over {settings.seconds} s"
    if why:
        os.write(1, f"Error: {why}\n".encode())
    os._exit(1 if code is None else code)


def _ended(worker: int) -> int | None:
    """The worker's exit code, as a shell has it, once it has one; others are forgotten."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return REFUSED
        if process == 0:
            return None
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _too_much(settings: Settings) -> str:
    processes = descendants()
    if len(processes) > settings.processes + 2:
        return f"the code had over {settings.processes} processes"
    if memory_of(processes, settings.memory) > settings.memory:
        return f"the code used over {settings.memory >> 20} MiB in all its processes"
    return ""


def _in_namespaces(settings: Settings) -> list[str]:
    """Returns in the code's process."""
    _join(settings.groups)
    if os.geteuid() == 0:
        # A user of nobody's: root needs no user namespace, which a container may not have.
        user = _FIRST_FREE_USER + os.getpid()
        kernel.unshare(_SPACES)
    else:
        user = _INNER_USER
        own_users(user, _SPACES)
    if first := os.fork():
        end_as(first)
    kernel.die_with_parent(signal.SIGKILL)
    view.enter(settings.folder)
    if os.geteuid() == 0:
        _become(user)
    version = tuple(int(each) for each in os.uname().release.split("-")[0].split(".")[:2])
    counted = user != _INNER_USER or version >= _COUNTED_PER_NAMESPACE
    _limit(settings, counted)
    lacking = _restrict(alone=True)
    os.environ["HOME"] = os.environ["TMPDIR"] = view.FOLDER
    # Before there is a child, whose code may run first and open this process's memory.
    kernel.show_own_files(False)
    if code := os.fork():
        # The first process of its namespace: the kernel ends all others with it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        end_as(code)
    kernel.show_own_files(True)
    return lacking


def _filtered(settings: Settings) -> list[str]:
    """Returns in the code's process, which is this one."""
    lacking = []
    _join(settings.groups)
    other = os.geteuid() == 0 and _reachable(settings.folder)
    if other:
        user = _FIRST_FREE_USER + os.getpid()
        os.chown(settings.folder, user, user)
        _become(user)
    _limit(settings, counted=other)
    os.chdir(settings.folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = settings.folder
    readable = view.readable_paths()
    kernel.drop_capabilities()
    try:
        filters.restrict_files(readable, [settings.folder], view.DEVICES)
        lacking.append("its files may fill the disk, in as many files of 16 MiB as it likes")
    except OSError as error:
        whose = "every user" if other else "your user"
        lacking.append(f"it reads and writes the files that {whose} may (Landlock: {error})")
        if not other:
            lacking.append("it reads the variables of your other processes")
    # Without it, nothing here cuts the network off.
    filters.filter_calls(alone=False)
    kernel.show_own_files(True)
    return lacking


def own_users(user: int, spaces: int) -> None:
    """Enter new namespaces, of users too, where this process's user is `user`."""
    outer, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEW_USERS | spaces)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {outer} 1"),
        ("gid_map", f"{user} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(line)


def _become(user: int) -> None:
    """A user that owns nothing; in a container that has few, the one that is nobody."""
    kernel.bound_capabilities()
    os.setgroups([])
    try:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _reachable(folder: str) -> bool:
    """Tell whether a user that owns nothing may go to Python's files and to the folder."""
    for path in (*view.readable_paths(), folder):
        above = os.path.dirname(path)
        while True:
            if not os.stat(above).st_mode & 0o001:
                return False
            if above == "/":
                break
            above = os.path.dirname(above)
    return True


def _restrict(alone: bool) -> list[str]:
    kernel.drop_capabilities()
    try:
        filters.filter_calls(alone)
    except OSError as error:
        return [f"no call of the kernel is refused to it ({error})"]
    return []


def _join(groups: list[str]) -> None:
    for group in groups:
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as stream:
            stream.write("0")


def _limit(settings: Settings, counted: bool) -> None:
    """counted: whether the kernel counts this user's processes apart from those of others."""
    limits = {
        resource.RLIMIT_CPU: settings.seconds,
        resource.RLIMIT_AS: settings.memory,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if counted:
        limits[resource.RLIMIT_NPROC] = settings.processes
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def end_as(process: int) -> NoReturn:
    """Wait for a child, and end as it does; those that lost their parents are waited for too."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _run(code: str) -> None:
    """Run the code as a script. The frames above it in a traceback are ours."""
    gc.freeze()
    module = types.ModuleType("__main__")
    space: dict[str, Any] = module.__dict__
    sys.modules["__main__"] = module
    sys.argv = [""]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        exec(compile(code, "<code>", "exec"), space)
    except Exception as error:
        below = None if error.__traceback__ is None else error.__traceback__.tb_next
        shown = traceback.TracebackException(type(error), error, below)
        print("".join(shown.format()), end="", file=sys.stderr)
        sys.exit(1)


def descendants() -> list[int]:
    """List the descendants of this process; those that ended and were not waited for too."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            stat = _read(f"/proc/{entry}/stat").rpartition(b") ")[2].split()
            if len(stat) > 1:
                children[int(stat[1])].append(int(entry))
    found = list(children[os.getpid()])
    for each in found:
        found += children[each]
    return found


def memory_of(processes: list[int], limit: int) -> int:
    """Bytes of all of them together. Pages that several share are told apart, which takes longer,
    only where they could make the difference to the limit."""
    held = (_read(f"/proc/{each}/statm").split() for each in processes)
    resident = sum(int(fields[1]) for fields in held if len(fields) > 1) * _PAGE
    if resident <= limit:
        return resident
    shares = (_share(_read(f"/proc/{each}/smaps_rollup")) for each in processes)
    known = [share for share in shares if share is not None]
    return sum(known) if known else resident


def end_all() -> None:
    """Kill until none is left. They are stopped first, so that none begins others meanwhile."""
    stopped: set[int] = set()
    while new := set(descendants()) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new
    while True:
        _signal(descendants(), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for each in processes:
        try:
            os.kill(each, number)
        except (ProcessLookupError, PermissionError):
            pass


def _share(rollup: bytes) -> int | None:
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:  # it ended meanwhile
        return b""

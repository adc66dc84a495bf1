"""Runs a command where paths are a task's: `/tests`, `/logs`, `/app` and what its image has.

    python -I -c "…space.main()" SETTINGS COMMAND ...

The host's files are there to read; folders of the task, `/tmp` and the home are the episode's own.
Namespaces of mounts and processes do it, so nothing that the command began outlives it: at its end,
at SIGTERM and with whoever started it, the kernel ends all. It has the host's network, where the
gateway is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from earl_core.environments.tools.sandbox import kernel, view
from earl_core.environments.tools.sandbox.program import REFUSED, end_as, own_users

_HOME = str(Path(__file__).resolve().parents[3])
_START = f"""\
import sys
sys.path.append({_HOME!r})
from earl_core.environments.task_directories.space import main
sys.path.remove({_HOME!r})
main()
"""
_SPACES = kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_PROCESSES
_HELD = kernel.NO_SUID | kernel.NO_DEVICES
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot:
# what the tests of a container's root may need. Nobody mounts, or takes a mount away.
_KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)
_TERMINALS = ("tty", *(Path(each).name for each in view.DEVICES))


@dataclass(frozen=True)
class Space:
    """root: the folder that becomes `/`. binds: paths of the host that are shown in it; their
    places are there. hidden: folders and files of the host that nobody reads. workdir: where the
    command runs; None: the space is made, nothing runs."""

    root: str
    binds: list[str]
    hidden: list[str]
    workdir: str | None

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` in this space."""
        settings = json.dumps(asdict(self))
        return [sys.executable, "-I", "-B", "-X", "utf8", "-c", _START, settings, *words]


def main() -> None:
    """Run the command and end as it does; `REFUSED` where the space cannot be had."""
    space = Space(**json.loads(sys.argv[1]))
    kernel.die_with_parent(signal.SIGKILL)
    try:
        _unshare()
        if first := os.fork():
            signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
            end_as(first)
        kernel.die_with_parent(signal.SIGKILL)
        _enter(space)
        kernel.bound_capabilities(_KEPT)
        if space.workdir is None:
            os._exit(0)
        os.chdir(space.workdir)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(REFUSED)
    if command := os.fork():
        # The first process of its namespace: the kernel ends all others with it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        end_as(command)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"{sys.argv[2]!r} cannot be run: {error}", file=sys.stderr, flush=True)
        os._exit(REFUSED)


def _unshare() -> None:
    if os.geteuid() == 0:
        try:
            return kernel.unshare(_SPACES)
        except OSError:  # the root of a container that may not mount
            pass
    own_users(0, _SPACES)
    return None


def _enter(space: Space) -> None:
    root = space.root
    # Without it, what is mounted below would be so for the host, too.
    kernel.attach(None, "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.attach(root, root, None, kernel.BIND)
    kernel.attach(None, root, None, kernel.REMOUNT | kernel.BIND | _HELD)
    for path in space.binds:
        kernel.attach(path, root + path, None, kernel.BIND | kernel.RECURSIVE)
    for mounted in view.mounts_below(root):
        kernel.attach(None, mounted, None, view.flags_of(mounted) | _HELD | kernel.READ_ONLY)
    for path in space.hidden:
        if os.path.isdir(root + path):
            data = "mode=755,size=64k"
            kernel.attach("tmpfs", root + path, "tmpfs", _HELD | kernel.READ_ONLY, data)
        elif os.path.exists(root + path):
            kernel.attach("/dev/null", root + path, None, kernel.BIND)
    _devices(f"{root}/dev")
    try:
        kernel.attach("proc", f"{root}/proc", "proc", _HELD | kernel.NO_PROGRAMS)
    except OSError:  # a container that hides parts of its own allows no other
        pass
    kernel.pivot_root(root)


def _devices(folder: str) -> None:
    kernel.attach("tmpfs", folder, "tmpfs", kernel.NO_SUID, "mode=755,size=64k")
    for name in _TERMINALS:
        place = f"{folder}/{name}"
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.attach(f"/dev/{name}", place, None, kernel.BIND)
    for name, kind, data in (
        ("shm", "tmpfs", "mode=1777"),
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
    ):
        os.mkdir(f"{folder}/{name}")
        kernel.attach(kind, f"{folder}/{name}", kind, kernel.NO_SUID, data)
    os.symlink("pts/ptmx", f"{folder}/ptmx")
    os.symlink("/proc/self/fd", f"{folder}/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{folder}/{name}")

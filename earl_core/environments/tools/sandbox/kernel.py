"""System calls that Python has no name for. All raise `OSError`."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Container

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS, NEW_CGROUPS, NEW_NAMES, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2

_DEATH_SIGNAL, _DUMPABLE, _BOUNDING_DROP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
_SECCOMP, _SECCOMP_FILTER, _AMBIENT, _AMBIENT_CLEAR = 22, 2, 47, 4
_CAPABILITIES_VERSION = 0x20080522

MACHINE = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
"""The place of this machine's numbers of system calls in our tables; None where we have none."""

_PIVOT_ROOT = (155, 41)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """Any call by its number; integers are passed as longs."""
    given = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    _libc.syscall.restype = ctypes.c_long
    return _checked(_libc.syscall(ctypes.c_long(number), *given), f"system call {number}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def attach(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Put a file system or a folder somewhere, or change how it is there: flags of mount(2)."""
    texts = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target!r}")


def pivot_root(folder: str) -> None:
    """Make a mount point the root and let go of the old one."""
    if MACHINE is None:
        raise OSError(errno.ENOSYS, "pivot_root: unknown on this machine")
    os.chdir(folder)
    system_call(_PIVOT_ROOT[MACHINE], b".", b".")
    _checked(_libc.umount2(b".", _DETACH), "umount")


def control(option: int, *values: object) -> None:
    """An operation of prctl(2) on this process."""
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in values]
    given += [ctypes.c_ulong(0)] * (4 - len(given))
    _checked(_libc.prctl(option, *given), f"prctl {option}")


def die_with_parent(signal: int) -> None:
    """Have the kernel send this signal when the parent is gone."""
    control(_DEATH_SIGNAL, signal)


def adopt_orphans() -> None:
    """Be the parent of descendants whose own parent ended."""
    control(_SUBREAPER, 1)


def show_own_files(shown: bool) -> None:
    """Have `/proc/self` belong to the process's user, or to root, as after a change of user."""
    control(_DUMPABLE, int(shown))


def drop_capabilities() -> None:
    """Have none, and gain none by any program."""
    control(_NO_NEW_PRIVILEGES, 1)
    bound_capabilities()
    try:
        control(_AMBIENT, _AMBIENT_CLEAR)
    except OSError:
        pass
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def bound_capabilities(kept: Container[int] = ()) -> None:
    """Let no program give any but the `kept`; before a change of the user, after which this is not
    allowed."""
    for number in range(64):
        if number in kept:
            continue
        try:
            control(_BOUNDING_DROP, number)
        except OSError:  # past the last one, or not allowed to, who then has none anyway
            break


def filter_calls(program: bytes) -> None:
    """Have each system call judged by a program of seccomp."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    whole = Program(len(program) // 8, program)
    control(_SECCOMP, _SECCOMP_FILTER, ctypes.byref(whole))

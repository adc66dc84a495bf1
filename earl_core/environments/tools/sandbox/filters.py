"""Limits of a process without namespaces: seccomp for system calls, Landlock for files.

Both need no rights. Numbers of system calls are those of x86_64 and aarch64.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator

from earl_core.environments.tools.sandbox import kernel

_ARCHITECTURE = (0xC000003E, 0xC00000B7)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
_CLONE, _CLONE3, _LIMITS, _SOCKET = (56, 220), (435, 435), (302, 261), (41, 198)
_NEW_SPACES = 0x7E020080

# Ways out of namespaces, into other processes, and into parts of the kernel that code has no use
# for; memory that no process shows as its own.
_NEVER = {
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "mq_open": (240, 180), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "vhangup": (153, 58),
}  # fmt: skip

# Where other processes of the same user can be seen: their signals, priorities and limits.
_OTHERS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip


def filter_calls(alone: bool) -> None:
    """Refuse what no code of a model needs. alone: whether a network namespace and a process
    namespace hold it already; else there are no sockets and no signals. Raises `OSError`."""
    if kernel.MACHINE is None:
        raise OSError(errno.ENOSYS, "the numbers of system calls are unknown on this machine")
    kernel.filter_calls(b"".join(_instructions(kernel.MACHINE, alone)))


def _instructions(machine: int, alone: bool) -> Iterator[bytes]:
    def one(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("<HBBI", code, then, otherwise, value)

    refuse = one(_RETURN, _ERROR | errno.EPERM)
    yield from (one(_LOAD, _ARCH), one(_EQUAL, _ARCHITECTURE[machine], 1), one(_RETURN, _KILL))
    yield from (one(_LOAD, _NUMBER), one(_AT_LEAST, _X32, 0, 1), one(_RETURN, _KILL))
    # An argument of a newer call is behind a pointer, which no filter reads; libraries then take
    # the older one.
    yield from (one(_EQUAL, _CLONE3[machine], 0, 1), one(_RETURN, _ERROR | errno.ENOSYS))
    yield from (one(_EQUAL, _CLONE[machine], 0, 4), one(_LOAD, _FIRST_ARGUMENT))
    yield from (one(_ANY_BIT, _NEW_SPACES, 0, 1), refuse, one(_LOAD, _NUMBER))
    refused = dict(_NEVER)
    if not alone:
        refused |= _OTHERS
        yield from (one(_EQUAL, _LIMITS[machine], 0, 4), one(_LOAD, _FIRST_ARGUMENT))
        yield from (one(_EQUAL, 0, 1), refuse, one(_LOAD, _NUMBER))
        yield one(_EQUAL, _SOCKET[machine], 0, 1)
        yield one(_RETURN, _ERROR | errno.ENETUNREACH)
    for numbers in refused.values():
        yield from (one(_EQUAL, numbers[machine], 0, 1), refuse)
    yield one(_RETURN, _ALLOW)


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE, _READ, _READ_FOLDER, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS = 16
_NETWORK_FROM, _SCOPES_FROM = 4, 6
_BIND_AND_CONNECT = _SOCKETS_AND_SIGNALS = 3


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> int:
    """Leave the process these paths alone; returns the version of Landlock. Raises `OSError`."""
    version = kernel.system_call(_CREATE, None, 0, _VERSION)
    every = (1 << _RIGHTS_OF_VERSION.get(version, _MOST_RIGHTS)) - 1
    fields = [every]
    if version >= _NETWORK_FROM:
        fields.append(_BIND_AND_CONNECT)
    if version >= _SCOPES_FROM:
        fields.append(_SOCKETS_AND_SIGNALS)
    rules = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = kernel.system_call(_CREATE, rules, len(rules), 0)
    reading = _EXECUTE | _READ
    for paths, rights in (
        (readable, reading | _READ_FOLDER),
        (writable, every),
        (devices, (_READ | _WRITE | _TRUNCATE) & every),
    ):
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = rights if os.path.isdir(path) else rights & (reading | _WRITE | _TRUNCATE)
            rule = struct.pack("<Qi", allowed & every, opened)
            kernel.system_call(_ADD, ruleset, _PATH_BENEATH, rule, 0)
            os.close(opened)
    kernel.system_call(_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return version

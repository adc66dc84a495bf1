"""Owners of the sockets that listen at a port of this machine, as Linux tells."""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

# linux/inet_diag.h, linux/netlink.h
_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x1 | 0x300
_DONE = 3
_ERROR = 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_SOURCE_PORT = struct.Struct("!4xH")
_USER = struct.Struct("=64xI")
_STATUS = struct.Struct("=i")
_LISTENING = 10
"""State of a socket, TCP_LISTEN."""


def owners_of(port: int) -> set[int]:
    """Users with a socket that listens at this port, at any address of this host."""
    try:
        found = [*_told(socket.AF_INET), *_told(socket.AF_INET6)]
    except OSError:
        # A sandbox, or a kernel without socket monitoring. The tables take ten milliseconds, which
        # each request to a server would wait.
        found = [*_read("/proc/net/tcp"), *_read("/proc/net/tcp6")]
    return {user for place, user in found if place == port}


def _read(table: str) -> Iterator[tuple[int, int]]:
    """Yield port and user of each socket of a table that listens."""
    with suppress(OSError):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if int(fields[3], 16) == _LISTENING:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[7])


def _told(family: int) -> Iterator[tuple[int, int]]:
    """Yield port and user of each socket that listens, as the kernel answers. Raises OSError."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTENING)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(header + request)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    # A module that is not there ends the answer with an error, and not before it.
                    if size >= _HEADER.size + 4 and _STATUS.unpack_from(data, _HEADER.size)[0] < 0:
                        raise OSError("the kernel does not tell who listens")
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not tell who listens")
                told = data[_HEADER.size : size]
                yield _SOURCE_PORT.unpack_from(told)[0], _USER.unpack_from(told)[0]
                data = data[(size + 3) & ~3 :]


def strangers_at(port: int) -> list[str]:
    """The names of other users who listen at this port."""
    others = sorted(owners_of(port) - {os.geteuid()})
    known = {each.pw_uid: each.pw_name for each in pwd.getpwall()}
    return [known.get(user, str(user)) for user in others]


def is_mine(url: str) -> bool:
    """Tell whether every socket that listens at this loopback address belongs to this user. False,
    too, where that cannot be told: nothing listens, another host, no /proc."""
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
        port = parts.port or 80
    except ValueError:
        return False
    if not address.is_loopback:
        return False
    owners = owners_of(port)
    return bool(owners) and owners == {os.geteuid()}

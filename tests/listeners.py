"""Which sockets processes listen on, as Linux shows them in /proc."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"


class Listener(NamedTuple):
    """A socket that others can reach; `kind` is tcp or udp, `command` its process's."""

    pid: int
    command: str
    kind: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Listening TCP sockets and bound, unconnected UDP sockets of these processes."""
    found = []
    for pid in pids:
        own = _inodes(pid)
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for inode, address, port in _bound(pid, table):
                if inode in own:
                    found.append(Listener(pid, _command(pid), table[:3], address, port))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _bound(pid: int, table: str) -> list[tuple[str, str, int]]:
    rows = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, peer, state, inode = fields[1], fields[2], fields[3], fields[9]
            unconnected = int(peer.partition(":")[2], 16) == 0
            if (state == _LISTENING) if table.startswith("tcp") else unconnected:
                host, _, port = local.partition(":")
                rows.append((inode, _address(host), int(port, 16)))
    return rows


def _address(text: str) -> str:
    words = bytes.fromhex(text)
    raw = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""

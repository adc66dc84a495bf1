"""Owners of the sockets that listen at a port of this machine, as Linux shows them in /proc."""

from __future__ import annotations

import ipaddress
import os
import pwd
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def owners_of(port: int) -> set[int]:
    """Users with a socket that listens at this port, at any address of this host."""
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    owners.add(int(fields[7]))
    return owners


def strangers_at(port: int) -> list[str]:
    """The names of other users who listen at this port."""
    others = sorted(owners_of(port) - {os.geteuid()})
    known = {each.pw_uid: each.pw_name for each in pwd.getpwall()}
    return [known.get(user, str(user)) for user in others]


def is_mine(url: str) -> bool:
    """Tell whether every socket that listens at this loopback address belongs to this user.

    False, too, where that cannot be told: nothing listens, another host, no /proc.
    """
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

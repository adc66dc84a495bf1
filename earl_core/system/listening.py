"""Sockets that listen at an address of this machine's."""

from __future__ import annotations

import errno
import socket

from earl_core.system.errors import ConfigError

_BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """Listen at a port, 0 for any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def listen_within(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen at the first free port of a range. Raises `ConfigError`."""
    first, last = ports
    for port in range(first, last + 1):
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"nobody can listen at {host}, port {port} ({error.strerror})",
                    remedy="correct rollout.gateway.host, or rollout.gateway.ports",
                ) from error
    raise ConfigError(
        f"every port of rollout.gateway.ports ({first} to {last}) is in use",
        remedy="name as many free ones as the host has engines",
    )

"""The name of this host, as manifests and plans use it."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    """`EARL_HOST` where it is set (containers often share one host name), else the host's name."""
    return os.environ.get("EARL_HOST") or socket.gethostname()

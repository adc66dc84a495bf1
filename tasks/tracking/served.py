"""Addresses at which clients of MLflow reach the server of `earl up`, and no other server."""

from __future__ import annotations

import os
from pathlib import Path

from earl_core.system.service import Service, known_services

CERTIFICATE = "MLFLOW_TRACKING_SERVER_CERT_PATH"
"""Environment variable: the file with the certificate that MLflow's clients trust, read at each of
their requests."""

_served: dict[str, Service] = {}
"""Servers of `earl up`, by the address with which they are asked."""


def served_address(runs_directory: str | Path, given: str | None) -> str | None:
    """The URL for programs, with user and password; None where another tracker is meant.

    given: what somebody named, if anything: also one of the server's own addresses, dead or not,
    so that nobody else is asked there.
    """
    known = known_services(runs_directory, "mlflow")
    if given:
        named = given.rstrip("/")
        known = [each for each in known if named in (each.url, each.secure, each.address)]
    else:
        known = [each for each in known if each.alive]
    server = known[0] if known else None
    if server is None or not server.certificate:
        return None
    _served[server.address] = server
    return server.address


def renewed(uri: str, runs_directory: str | Path) -> str:
    """The address of a server of `earl up` as it is now, because it may have been started again."""
    known = _served.get(uri)
    return uri if known is None else served_address(runs_directory, known.url) or uri


def pages_of(uri: str) -> str | None:
    """Return the address of a server of `earl up` for browsers; None for another server."""
    known = _served.get(uri)
    return known.url if known is not None else None


def trust_server_of(uri: str) -> None:
    """Have MLflow believe a server of `earl up` by its certificate alone, others as usual."""
    known = _served.get(uri)
    if known is not None:
        os.environ[CERTIFICATE] = known.certificate
    elif os.environ.get(CERTIFICATE) in {each.certificate for each in _served.values()}:
        del os.environ[CERTIFICATE]

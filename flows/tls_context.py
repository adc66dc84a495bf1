"""One TLS context for all clients of Prefect in this process.

Prefect makes two clients for each task run and one for each artifact, and has each read the root
certificates: 0.06 s of every stage (Prefect 3.7), also where the server speaks plain HTTP.
"""

from __future__ import annotations

import ssl
from functools import cache
from types import SimpleNamespace

from prefect.client import orchestration


def share_tls_context() -> None:
    """Make a context once for each file of certificates from now on; before the first flow."""
    if isinstance(orchestration.ssl, SimpleNamespace):
        return
    shared = SimpleNamespace(**vars(ssl))
    shared.create_default_context = cache(ssl.create_default_context)
    orchestration.ssl = shared  # type: ignore[assignment]

"""Which packages are installed, by their metadata: importing some of them takes many seconds."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str | None:
    """The version of an installed package, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None

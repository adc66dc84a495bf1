"""The command line. `earl = flows.cli:main`; prefect is imported by the commands that need it."""

from __future__ import annotations


def main() -> None:
    """Entry point of `earl`."""
    from flows.cli.app import app

    app(prog_name="earl")

"""The command line. `earl = flows.cli:main`; prefect is imported by the commands that need it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of `earl`."""
    from flows.cli.app import app

    # Environments, builders and reward functions by import path may lie in the working directory.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    app(prog_name="earl")

"""The command line. `earl = flows.cli:main`; prefect is imported by the commands that need it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of `earl`."""
    try:
        from earl_core.secrets import guard_output
        from flows.cli.app import app

        guard_output()

        # Environments, builders and reward functions by import path may lie in the working
        # directory.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        app(prog_name="earl")
    except KeyboardInterrupt:
        # In the middle of the imports; the commands themselves say what they leave behind.
        print("Stopped.", file=sys.stderr)
        sys.exit(130)

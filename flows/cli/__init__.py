"""The command line. Prefect is imported by the commands that need it.

`earl` starts in `earl_core.command`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `earl`."""
    try:
        from earl_core.secrets import guard_output
        from flows.cli.app import app

        guard_output()
        app(prog_name="earl")
    except KeyboardInterrupt:
        # In the middle of the imports; the commands themselves say what they leave behind.
        print("Stopped.", file=sys.stderr)
        sys.exit(130)

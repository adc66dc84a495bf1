"""Start of the command `earl`: in the one package whose name nobody else uses."""

from __future__ import annotations

import sys
from importlib import import_module

from earl_core.system.import_path import prepare


def main() -> None:
    """Entry point of `earl`: runs `flows.cli`, ours."""
    try:
        prepare()
    except ImportError as error:
        sys.exit(f"error: {error}")
    # By name, because this layer knows nothing of the ones above it.
    import_module("flows.cli").main()

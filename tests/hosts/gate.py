"""A reward function that lets a run go on when a test says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def opened(episode: dict[str, Any], gate: str) -> float:
    """Nothing, once the file is not there."""
    while Path(gate).exists():
        time.sleep(0.1)
    return 0.0

"""One finding of `earl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "warning", "blocks"]


@dataclass(frozen=True)
class Finding:
    """What was found and what to do about it. advice: empty when there is nothing to do."""

    level: Level
    topic: str
    text: str
    advice: str = ""

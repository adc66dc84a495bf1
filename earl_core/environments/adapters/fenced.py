"""An answer in a fenced block, as models like to write what a program is to read."""

from __future__ import annotations

import re

_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)


def unfenced(text: str) -> str:
    """What the last fenced block holds, or else the whole text; without outer white space."""
    found = _FENCED.findall(text)
    return (found[-1] if found else text).strip()

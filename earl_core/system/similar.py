"""The name that somebody meant who wrote another."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ALIKE = 0.7


def meant(name: object, known: Iterable[str]) -> str:
    """`did you mean 'x'? `, with the space, where a known name looks like this one, else ""."""
    plain = {_plain(each): each for each in known}
    near = difflib.get_close_matches(_plain(str(name)[:100]), plain, n=1, cutoff=_ALIKE)
    return f"did you mean {plain[near[0]]!r}? " if near else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s._/-]+", "_", name.strip().lower())

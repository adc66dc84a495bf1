"""Text as rules compare it: without case, accents, invisible characters and look-alikes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_ALIKE = str.maketrans(
    # Cyrillic, Greek and Armenian letters that look like Latin ones, after `casefold`; Latin ones
    # whose accent is no character of its own; dashes.
    "авекмнорстухіјѕԁһӏԛԝѵүαβεηικνορτυχγωհոօսցıłøđħŧɑɡ‐‑‒–—−",
    "abekmhopctyxijsdhlqwvyabenikvoptuxywhnougilodhtag------",
    # Letters that show nothing: fillers of Hangul, the blank of Braille.
    "\u115f\u1160\u2800",
)


class PlainText(NamedTuple):
    """text: as it is compared. places: index into the given text of each character of it."""

    text: str
    places: Sequence[int]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where characters `start` to `stop` of the text, at least one, stand in the given one."""
        return self.places[start], self.places[stop - 1] + 1


def plain(text: str) -> PlainText:
    """The text as rules compare it."""
    if text.isascii():
        return PlainText(text.lower(), range(len(text)))
    characters: list[str] = []
    places: list[int] = []
    for place, character in enumerate(text):
        found = character.lower() if character.isascii() else _folded(character).lower()
        characters.append(found)
        places += [place] * len(found)
    return PlainText("".join(characters), places)


@lru_cache(maxsize=4096)
def _folded(character: str) -> str:
    apart = unicodedata.normalize("NFKD", character).casefold()
    kept = (each for each in apart if unicodedata.category(each) not in ("Cf", "Mn", "Me"))
    return "".join(kept).translate(_ALIKE)

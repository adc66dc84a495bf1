"""Text as rules compare it: without case, accents, invisible characters and look-alikes.

There are three readings of a text: as it is (`plain`), with what is escaped in it as its characters
(`unescaped`), and that without breaks of lines (`unbroken`).
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

_ALIKE = str.maketrans(
    # Cyrillic, Greek and Armenian letters that look like Latin ones, after `casefold`; Latin ones
    # whose accent is no character of its own, and small capitals; dashes; quotes.
    "авекмнорстухіјѕԁһӏԛԝѵүαβεηικνορτυχγωհոօսցıłøđħŧɑɡᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ‐‑‒–—−‘’‛ʼ′`´",
    "abekmhopctyxijsdhlqwvyabenikvoptuxywhnougilodhtagabcdefghijklmnoprstuvwyz------'''''''",
    # Letters that show nothing: fillers of Hangul, the blank of Braille.
    "\u115f\u1160\u2800",
)
_INVISIBLE = ("Cc", "Cf", "Co", "Cs", "Mn", "Me")

_OTHERS = r"[^ -~\s]"
_COLOURS = r"(?:\x1b|\\+(?:u001[bB]|x1[bB]|033|e))\[[0-9;?]*[ -/]*[@-~]"
"""What colours a terminal, escaped or not."""
_ESCAPES = (
    _COLOURS + r"|\\+u[dD][89abAB][0-9a-fA-F]{2}\\+u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\+(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[nrt]|(?=[\"'/]))"
    r"|&(?:\#\d{1,7}|\#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});|(?:%[0-9a-fA-F]{2})+"
)
_BREAKS = r"[-\u00ad\u2010]?[ \t]*(?:\r?\n|(?:\\+r)?\\+n)\s*"
_LINES = str.maketrans("\n\r\t", "   ")
_PLAIN = re.compile(_OTHERS)
_UNESCAPED = re.compile(f"{_ESCAPES}|{_OTHERS}")
_UNBROKEN = re.compile(f"{_BREAKS}|{_ESCAPES}|{_OTHERS}")
_MARKS = re.compile(r"[\\&%\x1b]")


class PlainText(NamedTuple):
    """text: as it is compared. starts, stops: where what each character of it stands for begins and
    ends in the given one."""

    text: str
    starts: Sequence[int]
    stops: Sequence[int]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where characters `start` to `stop` of the text, at least one, stand in the given one."""
        return self.starts[start], self.stops[stop - 1]


def plain(text: str) -> PlainText:
    """The text as it is."""
    if text.isascii() and text.translate(_LINES).isprintable():
        return PlainText(text.lower(), range(len(text)), range(1, len(text) + 1))
    return _read(text, _PLAIN, _folded)


def unescaped(text: str) -> PlainText | None:
    """The text with escapes of JSON, HTML and URLs as the characters that they stand for, and
    without the colours of terminals. None: there are none, and it is `plain`."""
    if _MARKS.search(text) is None:
        return None
    return _read(text, _UNESCAPED, _meant)


def unbroken(text: str) -> PlainText | None:
    """`unescaped`, and lines put together without what is between them. None: it is `plain`."""
    if "\n" not in text and _MARKS.search(text) is None:
        return None
    return _read(text, _UNBROKEN, lambda found: "" if _is_break(found) else _meant(found))


def _is_break(found: str) -> bool:
    return "\n" in found or re.fullmatch(r"(?s)[-\u00ad\u2010]?.*\\n\s*", found) is not None


def _read(text: str, special: re.Pattern[str], meaning: Callable[[str], str]) -> PlainText:
    """All of the text but what is special is printable ASCII, or white space."""
    parts: list[str] = []
    starts: list[int] = []
    stops: list[int] = []
    done = 0
    for match in special.finditer(text):
        start, stop = match.span()
        found = meaning(match[0])
        parts += [text[done:start].lower(), found]
        starts += [*range(done, start), *[start] * len(found)]
        stops += [*range(done + 1, start + 1), *[stop] * len(found)]
        done = stop
    parts.append(text[done:].lower())
    starts += range(done, len(text))
    stops += range(done + 1, len(text) + 1)
    return PlainText("".join(parts), starts, stops)


def _meant(found: str) -> str:
    """An escape, or a character that is no ASCII, as it is compared."""
    if len(found) == 1 and found != "\\":
        return _folded(found)
    return "".join(map(_folded, _decoded(found)))


@lru_cache(maxsize=4096)
def _decoded(found: str) -> str:
    if found[0] == "&":
        return html.unescape(found)
    if found[0] == "%":
        return unquote(found, errors="replace")
    if re.fullmatch(_COLOURS, found):
        return ""
    escape = found.lstrip("\\")
    if escape[:1] in ("u", "U", "x"):
        code = "".join(re.findall(r"[0-9a-fA-F]{4,8}|(?<=x)[0-9a-fA-F]{2}", escape))
        if len(escape) > len("U12345678"):  # two halves of one character
            return bytes.fromhex(code).decode("utf-16-be", "replace")
        number = int(code, 16)
        return chr(number) if number < 0x110000 else ""
    return " " if escape else ""


@lru_cache(maxsize=4096)
def _folded(character: str) -> str:
    if character.isascii():
        return character.lower() if character.isprintable() or character.isspace() else ""
    apart = unicodedata.normalize("NFKD", character).casefold()
    kept = (each for each in apart if unicodedata.category(each) not in _INVISIBLE)
    return "".join(kept).translate(_ALIKE).lower()

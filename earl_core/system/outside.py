"""Files that people name, read within bounds: regular, of a size that is told, UTF-8."""

from __future__ import annotations

from pathlib import Path

from earl_core.system.errors import ConfigError, NotOurs
from earl_core.system.files import open_file

MOST_BYTES = 64 << 20
"""Largest size of a text that is read whole."""

_MARKS = {
    b"\xef\xbb\xbf": "utf-8",
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_text(path: Path, what: str, most: int = MOST_BYTES) -> str:
    """A regular file's text, without a byte order mark. Never waits, whatever lies there.

    what: names the file in errors, such as `the chat template x.jinja`. most: bytes. Raises
    `ConfigError` for what is no such text, and `OSError` for what cannot be opened.
    """
    try:
        with open_file(path, follow_links=True) as stream:
            content = stream.read(most + 1)
    except NotOurs:
        raise ConfigError(f"{what} is no regular file", remedy="name one") from None
    if len(content) > most:
        raise ConfigError(
            f"{what} has more than {most / 2**20:g} MiB", remedy="name the right file, or cut it"
        )
    return decoded(content, what)


def decoded(content: bytes, what: str) -> str:
    """UTF-8 as text, without a byte order mark. Raises `ConfigError` with what it seems to be."""
    mark = next((each for each in _MARKS if content.startswith(each)), b"")
    told = _MARKS.get(mark, "")
    if not told and b"\0" in content[:4]:
        told = "UTF-16"
    try:
        if told in ("", "utf-8"):
            return content[len(mark) :].decode()
        reason = f"it is {told}"
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte {content[error.start]:#04x} in line {line}, as in Latin-1 or Windows-1252"
    raise ConfigError(f"{what} is not UTF-8 ({reason})", remedy="save it as UTF-8")

"""The end of the output of a program that is ours to read."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable


class LastWords:
    """text: the last `most` characters so far. write: gets all of it, as it comes."""

    def __init__(self, most: int, write: Callable[[str], object] | None = None) -> None:
        self.text = ""
        self._most, self._write = most, write

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read to the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := await reader.read(2**16):
            text = decoder.decode(chunk)
            if self._write is not None:
                self._write(text)
            self.text = (self.text + text)[-self._most :]

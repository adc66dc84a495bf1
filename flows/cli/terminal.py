"""Texts of models, environments and functions on a terminal: read there, and steering nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of control, but tabs and ends of lines."""


def readable(text: str) -> str:
    """The text with a sign in the place of each character that would steer a terminal."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


class ReadableConsole(Console):
    """A console that makes every text readable; styles and its own controls are its own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of something that can be printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=readable(segment.text))

"""Numbers with their nouns."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Write a number with its noun that takes an s: `1 iteration`, `1,024 episodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

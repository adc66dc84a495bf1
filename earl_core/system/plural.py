"""Numbers with their nouns."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Write a number with its noun, such as `1 iteration` or `1,024 episodes`, for nouns that take
    an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

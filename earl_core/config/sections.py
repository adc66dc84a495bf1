"""The sections of a run file and their keys, as the models define them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from earl_core.config.run import RunConfig

_NAMED = 3
"""So many sections are named at most."""


@cache
def sections() -> dict[str, frozenset[str]]:
    """The keys of each section by its dotted name, "" for the whole file. A list of sections has
    the name of the list, such as `evaluation.suites`."""
    return {name: frozenset(model.model_fields) for name, model in _walk("", RunConfig)}


def advice(path: tuple[int | str, ...]) -> str:
    """Advise on an unknown key, named with the keys and list positions that lead to it."""
    *around, key = [str(part) for part in path if not isinstance(part, int)]
    here = sections().get(".".join(around), frozenset())
    places = [name for name, keys in sections().items() if key in keys]
    if similar := difflib.get_close_matches(key, here, n=1, cutoff=0.75):
        return f"did you mean `{similar[0]}`?"
    if places:
        named = " and of ".join(f"`{name}`" if name else "the file" for name in places[:_NAMED])
        return f"`{key}` is a key of {named}: move it there"
    return "remove it or correct its spelling"


def _walk(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield from _walk(f"{name}.{key}".lstrip("."), inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)

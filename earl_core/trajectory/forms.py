"""The form that an answer was held to: which grammar left its tokens their probability.

Where an answer is sampled under a grammar, the tokens that would leave it have probability 0, and
the log-probs are those of the distribution without them. Whoever computes these log-probs again
needs the same grammar, not its masks: a mask has a bit for each token of the vocabulary, 19 KB for
150,000 tokens, and a grammar says all of an answer's in a few hundred bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import NamedTuple


class Form(NamedTuple):
    """grammar: as `pretrained.grammars` reads it. stops: tokens that end an answer, which are
    allowed where the grammar's text is whole, and nowhere else."""

    grammar: str
    stops: tuple[int, ...] = ()


def dump_forms(forms: Sequence[Form | None]) -> str:
    """The forms of a sample's turns as JSON, each once, with the release of the library that masked
    by them; "" where no turn has one."""
    known = list(dict.fromkeys(form for form in forms if form is not None))
    if not known:
        return ""
    turns = [-1 if form is None else known.index(form) for form in forms]
    return json.dumps({"forms": known, "turns": turns, "xgrammar": release()})


def load_forms(text: str) -> list[Form | None]:
    """The forms of the turns that `dump_forms` has written; none for ""."""
    if not text:
        return []
    dumped = json.loads(text)
    known = [Form(grammar, tuple(stops)) for grammar, stops in dumped["forms"]]
    return [None if number < 0 else known[number] for number in dumped["turns"]]


def release_of(text: str) -> str:
    """The release of the library that `dump_forms` has written."""
    return str(json.loads(text)["xgrammar"])


@cache
def release() -> str:
    """The release of the library that is installed here."""
    return version("xgrammar")

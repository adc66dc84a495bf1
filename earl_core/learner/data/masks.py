"""Masks of answers that were sampled under a grammar, for the logits that are computed again.

They are walked anew from the grammar and the tokens, on the CPU, when a stage reads its rows;
nothing is where no answer has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from earl_core.pretrained.grammars import GrammarError, Grammars, Held, TokenMasks
from earl_core.trajectory.forms import load_forms, release, release_of

if TYPE_CHECKING:
    from earl_core.dispatch import Batch

FORMS = "forms"
"""Column of the forms that the answers of a sample were held to."""


@dataclass(frozen=True)
class PackedMasks:
    """Masks of a microbatch. rows: int32 [masks, vocabulary / 32]. index: int64 [T'], the row of
    each trained token, -1 where all tokens were allowed."""

    rows: np.ndarray
    index: np.ndarray

    def take(self, at: np.ndarray) -> PackedMasks:
        """Those of some of the trained tokens."""
        return PackedMasks(self.rows, self.index[at])


def masks_of(batch: Batch, grammars: Callable[[], Grammars]) -> list[TokenMasks | None]:
    """The masks of each row; None where no answer of it has a form. grammars: makes those of the
    policy's tokenizer. Raises `GrammarError` where an answer does not have its form, or the masks
    take too long, or the engine had them from another release of the library."""
    texts = batch.strings(FORMS) if FORMS in batch.names() else []
    if not any(texts):
        return [None] * len(batch)
    if others := {release_of(text) for text in texts if text} - {release()}:
        raise GrammarError(
            f"the engine masked with xgrammar {', '.join(sorted(others))} and the trainer has "
            f"{release()}: install one release on all machines"
        )
    return grammars().masks([_held(batch, row, text) for row, text in enumerate(texts)])


def _held(batch: Batch, row: int, text: str) -> Held:
    tokens, trained = batch.row("tokens", row), batch.row("loss_mask", row) != 0
    edges = [*batch.row("turn_starts", row).tolist(), len(tokens)]
    turns = zip(load_forms(text), edges[:-1], edges[1:], strict=True) if text else ()
    forms = [
        (form, first + np.flatnonzero(trained[first:stop]))
        for form, first, stop in turns
        if form is not None
    ]
    return Held(tokens, forms, f"episode {batch.scalars('episode_id')[row]}")


def pack_masks(
    masks: Sequence[TokenMasks | None], trained: Sequence[np.ndarray]
) -> PackedMasks | None:
    """Those of several samples, equal rows once; None where no sample has any. trained: the places
    of each one's trained tokens."""
    if all(each is None for each in masks):
        return None
    known: dict[bytes, int] = {}
    parts, words = [], 0
    for each, at in zip(masks, trained, strict=True):
        if each is None:
            parts.append(np.full(at.size, -1, np.int64))
            continue
        words = each.rows.shape[1]
        used, place = np.unique(each.index[at], return_inverse=True)
        numbers = [
            -1 if row < 0 else known.setdefault(each.rows[row].tobytes(), len(known))
            for row in used.tolist()
        ]
        parts.append(np.array(numbers, np.int64)[place])
    rows = np.frombuffer(bytearray().join(known), np.int32).reshape(len(known), words)
    return PackedMasks(rows, np.concatenate(parts))

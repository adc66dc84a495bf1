"""What the groups of a stream play, by their numbers in the run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from earl_core.control.prompt_waves import cursor_after, learnt_before
from earl_core.control.row_draws import RowDraws
from earl_core.rollout.mixture import Cursor, Draw, draw
from earl_core.run import RunDirectory


class GroupDraws:
    """Of a mixture each batch is drawn where the one before has ended, as that one's seal has it,
    whatever the settings were then.

    A curriculum learns for a batch from the returns of an iteration that is published before any of
    its groups is admitted. Were those made anew, the weights that sampled the groups would be
    others, and what is sealed of them would not be used.
    """

    def __init__(self, run: RunDirectory, rows: RowDraws) -> None:
        self._run, self._size = run, run.config.rollout.prompts_per_iteration
        self._rows = rows
        self._drawn: dict[int, tuple[list[Draw], Cursor]] = {}
        self._chosen: dict[int, tuple[list[Draw], dict[str, float]]] = {}
        self._settled = -1

    def of(self, group: int) -> Draw:
        """The environment's label and its prompt."""
        batch, place = divmod(group, self._size)
        return self._rows_of(batch)[0][place]

    def metrics(self, batch: int) -> dict[str, float]:
        """What a curriculum over rows knew when it chose those of a batch."""
        return self._rows_of(batch)[1]

    def outputs(self, batch: int) -> dict[str, Any]:
        """What a batch's seal says for those that follow."""
        if not self._run.config.environments:
            return {}
        cursor = self._batch(batch)[1]
        return {"cursor": {label: place.model_dump() for label, place in cursor.items()}}

    def settle(self, batch: int) -> None:
        """Forget the batches before this one, which is drawn from the seal of the last of them; all
        batches in a run that has gone back, whose returns are made anew."""
        if batch <= self._settled:
            self._drawn.clear()
            self._chosen.clear()
        self._settled = batch
        self._drawn = {each: drawn for each, drawn in self._drawn.items() if each >= batch}
        self._chosen = {each: rows for each, rows in self._chosen.items() if each >= batch}

    def _rows_of(self, batch: int) -> tuple[list[Draw], dict[str, float]]:
        """The batch's draws with the rows that curricula choose, and metrics of these."""
        if batch not in self._chosen:
            first = batch * self._size
            drawn: list[Draw] = [("", first + place) for place in range(self._size)]
            began = {"": first}
            if self._run.config.environments:
                drawn, after = self._batch(batch)
                of = Counter(label for label, _ in drawn)
                began = {label: place.drawn - of[label] for label, place in after.items()}
            self._chosen[batch] = self._rows.of(batch, drawn, began)
        return self._chosen[batch]

    def _batch(self, batch: int) -> tuple[list[Draw], Cursor]:
        if batch not in self._drawn:
            first, cursor = batch, self._after(batch - 1)
            while cursor is None:
                first -= 1
                cursor = self._after(first - 1)
            for each in range(first, batch + 1):
                config = self._run.config
                cursor = learnt_before(self._run, cursor, each)
                drawn = draw(config.mixture, cursor, config.curriculum, self._size)
                self._drawn[each] = drawn
                cursor = self._drawn[each][1]
        return self._drawn[batch]

    def _after(self, batch: int) -> Cursor | None:
        """Where the batch has ended; None where that is not known."""
        if batch in self._drawn:
            return self._drawn[batch][1]
        return {} if batch < 0 else cursor_after(self._run, batch)

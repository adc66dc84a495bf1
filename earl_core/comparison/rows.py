"""The first rows and columns in which two tables of samples differ.

Numbers are compared bit by bit: two NaN of the same bits are equal, 0.0 and -0.0 are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from earl_core.secrets import redact

_MOST_ROWS = 3
_AROUND = 24
"""Characters that are shown on either side of where texts part."""

_FIRST = ("prompt_id", "tokens", "loss_mask", "rollout_logprobs")
"""Columns that others follow from."""

_KEY = "sample_id"


class Cell(NamedTuple):
    """A column of one row. place: the first element that differs, None in a scalar. one, other:
    what stands there in either table, as text."""

    column: str
    place: int | None
    one: str
    other: str


class Row(NamedTuple):
    """A row that differs. ids: those of the sample, and of its episode, group and prompt where the
    table has them."""

    ids: dict[str, int]
    cells: list[Cell]


class RowDifference(NamedTuple):
    """compared: rows that both tables have. missing: rows of one table only, of either. columns:
    rows that differ, by column. rows: the first of them. draws: how the rows of a rollout part, see
    `Draws`."""

    compared: int
    missing: tuple[list[int], list[int]]
    columns: dict[str, int]
    rows: list[Row]
    draws: Draws | None

    @property
    def equal(self) -> bool:
        """Tell whether both tables hold the same rows."""
        return not self.columns and not any(self.missing)


class Draws(NamedTuple):
    """How rows part. drawn: rows whose first other token was sampled, all log-probs before it
    equal. before: sampled tokens of all rows that both have, after equal ones, with equal
    log-probs. given: rows likewise, but the first other token was not sampled. scored: rows in
    which a token that both have, after equal ones, has another log-prob."""

    drawn: int
    before: int
    given: int
    scored: int


def compare_rows(one: pa.Table, other: pa.Table) -> RowDifference:
    """Compare two tables with unique, ascending `sample_id`, in the columns that both have."""
    ids = [table[_KEY].to_numpy() for table in (one, other)]
    shared = np.intersect1d(*ids)
    missing = (np.setdiff1d(ids[0], shared).tolist(), np.setdiff1d(ids[1], shared).tolist())
    sides = [table.filter(pc.is_in(table[_KEY], pa.array(shared))) for table in (one, other)]
    names = [name for name in one.column_names if name in other.column_names and name != _KEY]
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    pairs = {name: [_Column(side[name]) for side in sides] for name in names}
    differing = {
        name: [row for row in range(len(shared)) if pair[0].bits(row) != pair[1].bits(row)]
        for name, pair in pairs.items()
        if not pair[0].same(pair[1])
    }
    columns = {name: len(rows) for name, rows in differing.items() if rows}
    first = sorted({row for rows in differing.values() for row in rows})[:_MOST_ROWS]
    rows = [
        Row(
            {_KEY: int(shared[row]), **_ids(sides[0], row)},
            [_cell(name, pairs[name], row) for name in columns if row in differing[name]],
        )
        for row in first
    ]
    draws = _draws(pairs, len(shared)) if set(_FIRST) <= pairs.keys() else None
    return RowDifference(len(shared), missing, columns, rows, draws)


class _Column:
    """A column, row by row."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = column.combine_chunks()
        if isinstance(whole, pa.ChunkedArray):
            whole = pa.concat_arrays(whole.chunks or [pa.array([], column.type)])
        self._whole = whole
        self.is_list = pa.types.is_large_list(column.type) or pa.types.is_list(column.type)
        kind = column.type.value_type if self.is_list else column.type
        self.is_text = pa.types.is_large_string(kind) or pa.types.is_string(kind)
        if self.is_text or whole.null_count:
            self._values: Any = whole.to_pylist()
            self._offsets: Any = None
        elif self.is_list:
            self._values = whole.values.to_numpy(zero_copy_only=False)
            self._offsets = whole.offsets.to_numpy()
        else:
            self._values = whole.to_numpy(zero_copy_only=False)
            self._offsets = None

    def row(self, row: int) -> Any:
        """A value, or the values of a list."""
        if self._offsets is None:
            return self._values[row]
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    def bits(self, row: int) -> Any:
        value = self.row(row)
        return value.tobytes() if isinstance(value, np.ndarray | np.generic) else value

    def same(self, other: _Column) -> bool:
        """Tell quickly whether all is equal; false where that takes a look at each row."""
        if not isinstance(self._values, np.ndarray) or not isinstance(other._values, np.ndarray):
            return bool(self._values == other._values)
        if self._offsets is not None and other._offsets is not None:
            offsets = self._offsets, other._offsets
            if offsets[0][0] != 0 or not np.array_equal(*offsets):
                return False
        return self._values.tobytes() == other._values.tobytes()


def _ids(table: pa.Table, row: int) -> dict[str, int]:
    names = ("episode_id", "group_id", "prompt_id")
    return {name: table[name][row].as_py() for name in names if name in table.column_names}


def _cell(name: str, pair: list[_Column], row: int) -> Cell:
    one, other = (column.row(row) for column in pair)
    if not pair[0].is_list:
        if pair[0].is_text:
            return Cell(name, None, *_excerpts(one, other))
        return Cell(name, None, _shown(one), _shown(other))
    place = next(
        (at for at, both in enumerate(zip(one, other, strict=False)) if _differ(*both)),
        min(len(one), len(other)),
    )
    ends = f"ends after {place}"
    values = [side[place] if place < len(side) else None for side in (one, other)]
    if pair[0].is_text and None not in values:
        return Cell(name, place, *_excerpts(*values))
    return Cell(name, place, *(ends if each is None else _shown(each) for each in values))


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, np.generic):
        return bool(one.tobytes() != other.tobytes())
    return bool(one != other)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return redact(json_text(value[: 2 * _AROUND]))
    if isinstance(value, np.floating):
        return repr(value.item()) if value.dtype == np.float64 else str(value)
    return str(value)


def json_text(text: str) -> str:
    """A text in quotes, on one line."""
    return '"' + text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'


def _excerpts(one: str | None, other: str | None) -> Iterator[str]:
    """What stands around the first character that differs. Secrets are hidden before it is cut."""
    texts = [redact(each or "") for each in (one, other)]
    pairs = enumerate(zip(*texts, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(map(len, texts)))
    for text in texts:
        begin, end = max(0, at - _AROUND), at + _AROUND
        cut = text[begin:end]
        yield ("…" if begin else "") + json_text(cut) + ("…" if end < len(text) else "")


def _draws(pairs: dict[str, list[_Column]], rows: int) -> Draws:
    drawn = before = given = scored = 0
    for row in range(rows):
        tokens, masks, logprobs = (
            [side.row(row) for side in pairs[name]] for name in _FIRST if name != "prompt_id"
        )
        length = min(map(len, tokens))
        other = np.flatnonzero(tokens[0][:length] != tokens[1][:length])
        until = int(other[0]) if len(other) else length
        bits = [each[:until].view(np.uint32) for each in logprobs]
        if not np.array_equal(bits[0], bits[1]):
            scored += 1
            continue
        before += int(np.count_nonzero(masks[0][:until]))
        if until < length or len(tokens[0]) != len(tokens[1]):
            sampled = until < length and masks[0][until] == 1 == masks[1][until]
            drawn, given = drawn + sampled, given + (not sampled)
    return Draws(drawn, before, given, scored)

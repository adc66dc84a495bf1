"""The batch that every way of moving it has to move: its columns, its rows, what must arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.trajectory.schema import per_token

COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype("int32"),
    "loss_mask": np.dtype("uint8"),
    "rollout_logprobs": np.dtype("float32"),
    "reference_logprobs": np.dtype("float32"),
    "advantages": np.dtype("float32"),
}
SCHEMA = pa.schema(
    [pa.field("sample_id", pa.int64(), nullable=False)]
    + [per_token(name, pa.from_numpy_dtype(dtype)) for name, dtype in COLUMNS.items()]
)
BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in COLUMNS.values())
_SOURCE_BYTES = 256 * 2**20
"""Of made-up data a producer at most; larger shares repeat it."""


@dataclass(frozen=True)
class Size:
    """One batch over N producers and N consumers: `samples` rows of `tokens` tokens.

    Producer p makes the rows of its stretch, consumer c gets the rows c, c + N, c + 2N, ..., so
    that every consumer needs rows of every producer.
    """

    name: str
    samples: int
    tokens: int
    workers: int

    @classmethod
    def of_bytes(cls, name: str, size: int, tokens: int, workers: int) -> Size:
        """About `size` bytes of samples of `tokens` tokens."""
        share = round(size / (tokens * BYTES_PER_TOKEN * workers))
        return cls(name, share * workers, tokens, workers)

    @property
    def bytes(self) -> int:
        """Bytes of all columns."""
        return self.samples * self.tokens * BYTES_PER_TOKEN

    @property
    def share(self) -> int:
        """Rows of a producer."""
        return self.samples // self.workers

    def made_by(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a producer's rows."""
        return np.arange(rank * self.share, (rank + 1) * self.share)

    def wanted_by(self, rank: int) -> np.ndarray:
        """int64 sample_ids of a consumer's rows."""
        return np.arange(rank, self.samples, self.workers)


class Source:
    """What a producer has computed: warm arrays [rows, tokens] by column."""

    def __init__(self, size: Size, rank: int) -> None:
        self.rows = size.made_by(rank)
        kept = max(1, min(size.share, _SOURCE_BYTES // (size.tokens * BYTES_PER_TOKEN)))
        self._first = int(self.rows[0])
        self._kept = kept
        self._arrays = {
            name: np.stack([row_of(size, rank * size.share + row, name) for row in range(kept)])
            for name in COLUMNS
        }

    def fill(self, name: str, into: np.ndarray) -> None:
        """Copy a column into memory of the same dtype, flat or [rows, tokens]."""
        source = self._arrays[name].reshape(-1)
        flat = into.reshape(-1)
        for start in range(0, len(flat), len(source)):
            part = flat[start : start + len(source)]
            part[:] = source[: len(part)]

    def whole(self, name: str) -> np.ndarray:
        """A column [rows, tokens]; the source itself where it is not repeated."""
        array = self._arrays[name]
        if len(array) == len(self.rows):
            return array
        full = np.empty((len(self.rows), array.shape[1]), array.dtype)
        self.fill(name, full)
        return full


def row_of(size: Size, sample: int, name: str) -> np.ndarray:
    """What row `sample` of a column holds."""
    kept = max(1, min(size.share, _SOURCE_BYTES // (size.tokens * BYTES_PER_TOKEN)))
    share, row = divmod(sample, size.share)
    seed = (share * size.share + row % kept) * 7919 + list(COLUMNS).index(name) * 104729
    return ((np.arange(size.tokens) + seed) % 251).astype(COLUMNS[name])


def check(size: Size, rows: np.ndarray, name: str, arrived: list[np.ndarray]) -> None:
    """Raise `RuntimeError` unless these are the rows of a column."""
    if len(rows) != len(arrived):
        raise RuntimeError(f"{len(arrived)} rows of {name} arrived, not {len(rows)}")
    for sample, array in zip(rows.tolist(), arrived, strict=True):
        if not np.array_equal(array, row_of(size, sample, name)):
            raise RuntimeError(f"row {sample} of {name} arrived with other values")

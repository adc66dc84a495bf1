"""The routing of tokens: the experts that each was given in each routed layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from earl_core.system.errors import ConfigError, EarlError

HASH_BYTES = 8
"""Bytes of a token's hash, which is stored beside its numbers."""

_ROWS = 256
"""Tokens that are hashed at a time: few, so that their copies stay in a cache."""


@dataclass(frozen=True)
class RoutingShape:
    """Routed layers, experts that a token is given in each, and experts that each has."""

    layers: int
    chosen: int
    experts: int

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.layers * self.chosen

    @property
    def dtype(self) -> str:
        """Type of the numbers. Its largest one, in all places of a token, says that nothing was
        recorded; no choice of different experts looks so."""
        fits = self.experts < 256 or (self.experts == 256 and self.chosen > 1)
        return "uint8" if fits else "int16"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's numbers."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of a token in the shards of a rollout: its numbers and their hash."""
        return self.token_bytes + HASH_BYTES

    @property
    def unrecorded(self) -> int:
        """The number of a token without a record."""
        return int(np.iinfo(self.dtype).max)

    def column(self, rows: np.ndarray | None, tokens: int) -> np.ndarray:
        """A sample's numbers, one after the other. rows: of its first tokens, [those, width]; the
        others have no record."""
        column = np.full(tokens * self.width, self.unrecorded, self.dtype)
        if rows is not None:
            column[: rows.size] = rows.reshape(-1)
        return column

    def hashes(self, column: np.ndarray) -> np.ndarray:
        """A hash of each token's numbers, int64 [tokens], by which tokens of equal routing are
        found without reading it. column: as `column` makes it.

        Different routings of two equal tokens have one hash by chance once in 2**64, so in an
        iteration that compares ten million tokens with a probability of 5e-13. Such a token would
        be trained under the other's experts, as if routers had chosen otherwise; no more.
        """
        rows = np.ascontiguousarray(column, self.dtype).reshape(-1)
        rows = rows.view(f"V{self.token_bytes}")
        found = np.empty(len(rows), np.uint64)
        for first in range(0, len(rows), _ROWS):
            some = rows[first : first + _ROWS].tolist()
            found[first : first + _ROWS] = [*map(xxhash.xxh3_64_intdigest, some)]
        return found.view(np.int64)


class RecordedRouting:
    """The routing of one sample's tokens where it lies: read token by token, so that a rank reads
    its own tokens' alone, and checked and counted when it is read.

    hashes: int64 [tokens], as `RoutingShape.hashes` makes them. read_bytes: of all reads so far.
    """

    def __init__(
        self,
        shape: RoutingShape,
        numbers: np.ndarray,
        tokens: int,
        whose: str,
        hashes: np.ndarray | None = None,
    ) -> None:
        """numbers: of all tokens, one after the other; a view. whose: for messages. hashes: None:
        they are made of the numbers, all of which are read. Raises `RoutingError` where numbers are
        too few or too many, and then what `read` raises."""
        if numbers.size != tokens * shape.width:
            raise RoutingError(
                f"the routing of {whose} has {numbers.size} numbers for {tokens} tokens, the model "
                f"needs {tokens * shape.width} ({shape.layers} layers x {shape.chosen} experts)",
            )
        self.shape = shape
        self.read_bytes = 0
        self._rows = numbers.reshape(tokens, shape.width)
        self._whose = whose
        self.hashes = shape.hashes(self.read(np.arange(tokens))) if hashes is None else hashes

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, places: np.ndarray) -> np.ndarray:
        """A copy of the numbers of these tokens, [n, width]. Raises `RoutingError` for an expert
        that no layer has."""
        rows = self._rows[places]
        self.read_bytes += rows.nbytes
        odd = (rows < 0) | (rows >= self.shape.experts)
        # Only whole tokens are without a record.
        odd &= ~(rows == np.iinfo(rows.dtype).max).all(axis=1, keepdims=True)
        if odd.any():
            row, number = np.argwhere(odd)[0].tolist()
            raise RoutingError(
                f"the routing of {self._whose} names expert {rows[row, number]} for token "
                f"{places[row]} in routed layer {number // self.shape.chosen}, the model has "
                f"{self.shape.experts}"
            )
        return rows


class RoutingError(EarlError):
    """A damaged shard: its routing is of no such model."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"damaged shard: {problem}", remedy="resume the run, which plays its rollout again"
        )


def untold(whose: str) -> ConfigError:
    """The refusal of routers of a kind that cannot be replayed. whose: words before `routers`."""
    return ConfigError(
        f"{whose} routers choose experts in a way that cannot be repeated in the update",
        remedy="set rollout.record_routing=off to train it under the experts that the trainer's "
        "own routers choose",
    )

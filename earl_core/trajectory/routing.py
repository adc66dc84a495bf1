"""The routing of tokens: the experts that each was given in each routed layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earl_core.system.errors import ConfigError, EarlError


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

    def check(self, routing: np.ndarray, tokens: int, whose: str) -> np.ndarray:
        """A sample's routing as [tokens, width]. Raises `RoutingError` where it is not one of this
        model: of another size, or with an expert that no layer has."""
        if routing.size != tokens * self.width:
            raise RoutingError(
                f"the routing of {whose} has {routing.size} numbers for {tokens} tokens, the model "
                f"needs {tokens * self.width} ({self.layers} layers x {self.chosen} experts)",
            )
        rows = routing.reshape(tokens, self.width)
        odd = rows >= self.experts
        # Only whole tokens are without a record.
        odd &= ~(rows == np.iinfo(rows.dtype).max).all(axis=1, keepdims=True)
        if odd.any():
            token, place = np.argwhere(odd)[0].tolist()
            raise RoutingError(
                f"the routing of {whose} names expert {rows[token, place]} for token {token} in "
                f"routed layer {place // self.chosen}, the model has {self.experts}"
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

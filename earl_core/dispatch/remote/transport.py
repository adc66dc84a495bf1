"""Requests to another host: byte ranges of sealed shards, or the reason why they cannot be had.

The transport gives verified bytes or raises; it never gives wrong ones. Blocks are checked against
the shard's block table at the side that holds the shard, and the table against the checksum of the
manifest, so that memory which went bad on the producer is found before it is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from earl_core.dispatch.shards.shard import Proof
from earl_core.system.errors import EarlError

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}-(\d{1,20})\.arrow")
"""Names that may be asked for: a sealed shard, with its generation, in the run's own directory."""


class TransportError(EarlError):
    """Bytes could not be brought here: refused, late, out of reach, damaged or released."""


class Range(NamedTuple):
    """`length` bytes from byte `start` of a shard's file, which must be of this generation."""

    file: str
    generation: int
    start: int
    length: int


@dataclass(frozen=True)
class RemoteRead:
    """A read from one host: `ranges[i]` fills `into[i]`, whose length is equal."""

    ranges: Sequence[Range]
    into: Sequence[memoryview]

    def __post_init__(self) -> None:
        wanted = [item.length for item in self.ranges]
        if wanted != [view.nbytes for view in self.into]:
            raise ValueError("every range needs a destination of exactly its length")


def proof_for(item: Range, proofs: Mapping[str, Proof]) -> Proof:
    """The proof of a range's file. Raises `TransportError` when the range does not fit to it."""
    proof = proofs.get(item.file)
    if proof is None:
        raise TransportError(f"no manifest was given for the shard {item.file!r}")
    if proof.generation != item.generation:
        raise TransportError(
            f"the plan wants generation {item.generation} of {item.file}, its manifest describes "
            f"{proof.generation}: make the plan from the same manifests"
        )
    return proof

"""A read from one host, cut into the requests that are sent for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from earl_core.dispatch.remote import protocol
from earl_core.dispatch.remote.transport import Range, RemoteRead, proof_for
from earl_core.dispatch.shards.shard import Proof


@dataclass
class Question:
    """One request: some ranges, where their bytes go, and the proofs of their files."""

    ranges: list[Range] = field(default_factory=list)
    into: list[memoryview] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)
    size: int = 0


def cut(read: RemoteRead, proofs: Mapping[str, Proof], request_bytes: int) -> deque[Question]:
    """Cut a read into requests of about `request_bytes`: long ranges divided, short ones joined."""
    found: deque[Question] = deque()
    for item, view in _pieces(read, request_bytes):
        if not found or not _has_room(found[-1], item, request_bytes):
            found.append(Question())
        current = found[-1]
        current.ranges.append(item)
        current.into.append(view)
        current.proofs[item.file] = proof_for(item, proofs)
        current.size += item.length
    return found


def _has_room(question: Question, item: Range, request_bytes: int) -> bool:
    return (
        question.size + item.length <= request_bytes
        and len(question.ranges) < protocol.MAX_RANGES
        and (item.file in question.proofs or len(question.proofs) < protocol.MAX_FILES)
    )


def _pieces(read: RemoteRead, most: int) -> Iterable[tuple[Range, memoryview]]:
    for item, place in zip(read.ranges, read.into, strict=True):
        view = place.cast("B")
        for begin in range(0, item.length, most):
            size = min(most, item.length - begin)
            piece = Range(item.file, item.generation, item.start + begin, size)
            yield piece, view[begin : begin + size]

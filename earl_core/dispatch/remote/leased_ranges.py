"""Ranges of shards that lie on this host: checked, then lent to whoever sends them to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from earl_core.dispatch.remote.transport import FILE_NAME, Range, TransportError, proof_for
from earl_core.dispatch.segments.leases import Mapped, ShardMismatch, map_shared
from earl_core.dispatch.shards.manifest import ManifestError
from earl_core.dispatch.shards.shard import Proof, verify_blocks
from earl_core.system.processes import host_name

_MIN_BLOCK = 4096


@contextmanager
def leased_views(
    directory: Path, ranges: Sequence[Range], proofs: Mapping[str, Proof]
) -> Iterator[list[memoryview]]:
    """The bytes of each range as a read-only view, under leases, checked.

    Raises `TransportError` for names and ranges that no manifest could hold, for shards that are
    not there in this generation, and for blocks that do not match the block table.
    """
    leases: dict[str, Mapped] = {}
    views: list[memoryview] = []
    try:
        for item in ranges:
            proof = proof_for(item, proofs)
            if item.file not in leases:
                _check_proof(proof)
                leases[item.file] = _lease(directory, proof)
            _check_range(item, proof)
        for file, mapped in leases.items():
            _verify(mapped, proofs[file], [item for item in ranges if item.file == file])
        for item in ranges:
            views.append(leases[item.file].memory[item.start : item.start + item.length])
        yield views
    finally:
        for view in views:
            view.release()
        for mapped in leases.values():
            # The traceback of an error keeps views alive: the lease goes with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()


def _verify(mapped: Mapped, proof: Proof, ranges: Sequence[Range]) -> None:
    """Check the blocks that the ranges of one file touch, each once."""
    try:
        verify_blocks(mapped.memory, proof, [(item.start, item.length) for item in ranges])
    except ManifestError as error:
        raise TransportError(
            f"{error}: the memory of host {host_name()!r} is damaged, or the manifest is not this "
            "shard's; resume the run, which computes the shard again"
        ) from error


def _check_proof(proof: Proof) -> None:
    match = FILE_NAME.fullmatch(proof.file)
    if match is None:
        raise TransportError(f"{proof.file!r} is not the name of a sealed shard")
    if int(match[1]) != proof.generation:
        raise TransportError(f"{proof.file} is not of generation {proof.generation}")
    inside = all(
        start >= 0 and size >= 0 and start + size <= proof.bytes
        for start, size in (proof.body, proof.checksums)
    )
    blocks = -(-proof.body[1] // max(proof.block_bytes, _MIN_BLOCK))
    if not inside or proof.block_bytes < _MIN_BLOCK or proof.checksums[1] != 8 * (1 + blocks):
        raise TransportError(f"the description of {proof.file} contradicts itself")


def _check_range(item: Range, proof: Proof) -> None:
    begin, size = proof.body
    if item.length <= 0 or item.start < begin or item.start + item.length > begin + size:
        raise TransportError(
            f"bytes {item.start} to {item.start + item.length} lie outside of the data of "
            f"{item.file}, which is bytes {begin} to {begin + size}"
        )


def _lease(directory: Path, proof: Proof) -> Mapped:
    try:
        return map_shared(directory / proof.file, proof.bytes)
    except (FileNotFoundError, ShardMismatch) as error:
        raise TransportError(
            f"the shard {proof.file} is not on host {host_name()!r}: it was released or never "
            "written; resume the run, which computes it again"
        ) from error

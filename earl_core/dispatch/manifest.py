"""Manifests: the sealed, small descriptions of what a stage produced.

A manifest is JSON, self-checking (its digest covers everything else) and the only thing that
passes through the controller. It names shards (host, file, byte ranges, row lengths, checksum)
but never a path outside the run's own directory in shared memory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from earl_core.files import canonical_json, write_atomic


class ManifestError(RuntimeError):
    """A manifest or shard that is missing, damaged or of another run."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ColumnRange(_Record):
    """Where one column's buffers lie in the shard's file, in bytes from its start."""

    dtype: str = Field(pattern=r"^(int8|uint8|int16|int32|int64|float32|float64|string)$")
    values: tuple[int, int] = Field(description="start and length of the values")
    offsets: tuple[int, int] | None = Field(
        default=None, description="start and length of the int64 row offsets of a list column"
    )


class ShardEntry(_Record):
    """One Arrow IPC file with one record batch."""

    host: str
    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name in the store")
    bytes: int = Field(ge=0)
    generation: int = Field(ge=0)
    rows: int = Field(ge=0)
    row_ids: tuple[int, ...] = Field(description="sample_id of each row, ascending")
    row_lengths: tuple[int, ...] = Field(description="tokens of each row; empty without lists")
    columns: dict[str, ColumnRange]
    checksum: str = Field(description="xxh3_64 of the columns' buffers, in hex")


class Manifest(_Record):
    """What one stage or step of one iteration produced."""

    format: Literal["earl.manifest/1"] = "earl.manifest/1"
    run: str
    iteration: int = Field(ge=0)
    stage: str
    key: str = Field(description="what must be equal for the stage to count as finished")
    policy_version: int = Field(ge=0, description="the weights that the stage started from")
    shards: tuple[ShardEntry, ...] = ()
    outputs: dict[str, Any] = Field(default_factory=dict, description="small results, JSON")
    metrics: dict[str, float] = Field(default_factory=dict)
    digest: str = ""

    def sealed(self) -> Manifest:
        """A copy with its digest filled in."""
        return self.model_copy(update={"digest": self.content_digest()})

    def content_digest(self) -> str:
        """sha256 over everything but the digest itself and the metrics (timings vary)."""
        content = self.model_dump(mode="json", exclude={"digest", "metrics"})
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def data_digest(self) -> str:
        """sha256 over the data alone: key, rows, checksums, outputs; equal for equal results."""
        shards = [(s.rows, s.row_ids, s.row_lengths, s.checksum) for s in self.shards]
        content = [self.stage, self.iteration, self.key, shards, self.outputs.get("digest")]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    @property
    def tensor_bytes(self) -> int:
        """Bytes that stayed in shared memory instead of passing through the controller."""
        return sum(entry.bytes for entry in self.shards)

    def column_names(self) -> set[str]:
        """Columns that every shard has."""
        names = [set(entry.columns) for entry in self.shards]
        return set.intersection(*names) if names else set()


def write_manifest(path: Path, manifest: Manifest) -> Manifest:
    """Seal `manifest` and write it atomically to `path`; returns the sealed manifest."""
    sealed = manifest.sealed()
    text = json.dumps(sealed.model_dump(mode="json"), allow_nan=False)
    write_atomic(path, text.encode())
    return sealed


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises `ManifestError` when it is missing, not of this format, or its digest does not match.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"the manifest {path} cannot be read: {error.strerror}") from error
    try:
        return parse_manifest(json.loads(raw))
    except (ValidationError, ValueError, ManifestError) as error:
        raise ManifestError(
            f"the manifest {path} is damaged ({str(error).splitlines()[0]}); delete it and its "
            "stage is repeated on resume"
        ) from error


def parse_manifest(raw: dict[str, Any]) -> Manifest:
    """A manifest from plain JSON, checked against its digest."""
    manifest = Manifest.model_validate(raw)
    if manifest.digest != manifest.content_digest():
        raise ManifestError("its digest does not match its content")
    return manifest

"""Manifests: the sealed, small descriptions of what a stage produced.

A manifest is JSON, self-checking (its digest covers everything else) and the only thing that
passes through the controller. It names shards (host, file, byte ranges, row lengths, checksums)
but never a path outside the run's own directory in shared memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PrivateAttr, model_validator

from earl_core.dispatch.segments.pool_directory import SHARD_PATTERN
from earl_core.system.errors import EarlError
from earl_core.system.files import canonical_json, read_file, write_atomic

TOKEN_AXIS = "tokens"
"""The axis of columns with one element per token."""


class ManifestError(EarlError):
    """A manifest or shard that is missing, damaged or of another run."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Span = tuple[NonNegativeInt, NonNegativeInt]
"""Start and length in bytes, from the start of the shard's file."""


class ColumnRange(_Record):
    """Places of one column's buffers in the shard's file."""

    dtype: str = Field(pattern=r"^(int8|uint8|int16|int32|int64|float32|float64|string)$")
    values: Span
    offsets: Span | None = Field(
        default=None, description="the int64 row offsets of a list or string column"
    )
    axis: str | None = Field(
        default=None, description="which of the shard's axes counts its elements; None: scalar"
    )

    @property
    def itemsize(self) -> int:
        """Bytes of one element; strings count in bytes of UTF-8."""
        return 1 if self.dtype == "string" else int(np.dtype(self.dtype).itemsize)


class ShardEntry(_Record):
    """One Arrow IPC file with one record batch.

    Checked on creation: every range lies inside of the file and fits to the rows, so that whoever
    reads by an entry stays within the shard. Raises `pydantic.ValidationError` otherwise.
    """

    host: str
    file: str = Field(pattern=SHARD_PATTERN, description="name in the store")
    bytes: int = Field(ge=0, description="size of the file, its unused space included")
    generation: int = Field(ge=0)
    rows: int = Field(ge=0)
    row_ids: tuple[int, ...] = Field(description="sample_id of each row, ascending")
    axes: dict[str, tuple[NonNegativeInt, ...]] = Field(
        description="elements of each row, for every way of counting them (`tokens`, turns, ...)"
    )
    columns: dict[str, ColumnRange]
    body: Span = Field(description="the buffers of all columns; checksums cover just this")
    checksums: Span = Field(
        description="the block table: uint64 of the layout, then xxh3_64 of each block of the body"
    )
    block_bytes: int = Field(ge=1, description="bytes of a block of the body; the last is shorter")
    checksum: str = Field(
        pattern=r"^([0-9a-f]{16})?$", description="xxh3_64 of the block table; empty while pending"
    )
    _pending: Future[str] | None = PrivateAttr(default=None)
    """The checksum that is being computed, in the process that wrote the shard."""

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row, or elements of its first list column; empty without lists."""
        if TOKEN_AXIS in self.axes:
            return self.axes[TOKEN_AXIS]
        for column in self.columns.values():
            if column.axis is not None and column.dtype != "string":
                return self.axes[column.axis]
        return ()

    @cached_property
    def ids(self) -> np.ndarray:
        """`row_ids` as int64. Raises `ManifestError` for a number beyond 64 bits."""
        return _integers(self.row_ids)

    @cached_property
    def lengths(self) -> dict[str, np.ndarray]:
        """`axes` as int64. Raises `ManifestError` for a number beyond 64 bits."""
        return {axis: _integers(lengths) for axis, lengths in self.axes.items()}

    @cached_property
    def layout(self) -> int:
        """xxh3_64 over what says where everything lies: rows, lengths, columns, body, blocks.

        The shard holds it under its checksum, so that an entry that was edited does not pass.
        Raises `ManifestError` for a number beyond 64 bits.
        """
        digest = xxhash.xxh3_64(repr((self.rows, self.body, self.block_bytes)).encode())
        for name, numbers in (("", self.ids), *sorted(self.lengths.items())):
            digest.update(f"{name}:{len(numbers)}:".encode())
            digest.update(numbers.tobytes())
        for name, column in sorted(self.columns.items()):
            place = (name, column.dtype, column.values, column.offsets, column.axis)
            digest.update(repr(place).encode())
        return digest.intdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, without the values that were computed of the old numbers."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("ids", "lengths", "layout"):
            copied.__dict__.pop(name, None)
        return copied

    @model_validator(mode="after")
    def _ranges_fit(self) -> ShardEntry:
        if len(self.row_ids) != self.rows:
            raise ValueError(f"{self.file} has {self.rows} rows but {len(self.row_ids)} row ids")
        body_start, body_length = self.body
        body_end = body_start + body_length
        table_start, table_length = self.checksums
        blocks = -(-body_length // self.block_bytes)
        if table_length != 8 * (1 + blocks) or table_start < body_end:
            raise ValueError(f"the block table of {self.file} does not fit to its body")
        if table_start + table_length > self.bytes:
            raise ValueError(f"the body or block table of {self.file} lies outside of it")
        totals = {axis: sum(lengths) for axis, lengths in self.axes.items()}
        for axis, lengths in self.axes.items():
            if len(lengths) != self.rows:
                raise ValueError(f"axis {axis!r} of {self.file} has {len(lengths)} rows")
        for name, column in self.columns.items():
            if column.axis is not None and column.axis not in totals:
                raise ValueError(f"column {name!r} of {self.file} has no axis {column.axis!r}")
            if (column.axis is None) != (column.offsets is None):
                raise ValueError(f"column {name!r} of {self.file} has an axis without offsets")
            elements = self.rows if column.axis is None else totals[column.axis]
            spans = [(column.values, elements * column.itemsize, column.itemsize)]
            if column.offsets is not None:
                spans.append((column.offsets, 8 * (self.rows + 1), 8))
            for (start, length), wanted, itemsize in spans:
                inside = body_start <= start and start + length <= body_end
                if length != wanted or not inside or start % itemsize:
                    raise ValueError(f"the bytes of column {name!r} of {self.file} do not fit")
        return self


_LOOK_SECONDS = 0.1

_Format = Literal["earl.manifest/3"]
(FORMAT,) = get_args(_Format)


class Manifest(_Record):
    """The product of one stage or step of one iteration.

    A worked example: one entry of a rollout, of two samples with 5 and 3 tokens (only two of its
    columns are shown; numbers are bytes from the start of the file, as start and length):

        host, file   oak, 000012-rollout-0-1795389154657751423.arrow   (the last is the generation)
        rows         2
        row_ids      131072, 196608         the first samples of episodes 2 and 3
        axes         tokens: 5, 3
        columns      sample_id: int64, values (896, 16)
                     tokens: int32, values (1024, 32), offsets (960, 24), axis tokens
        body         (896, 192)             ends where the last column ends, rounded up to 64
        checksums    (12184, 16)            of the layout, and of the body's only block

    The tokens of the second row are the 3 * 4 bytes from 1024 + 5 * 4 on: no reader needs more.
    """

    format: _Format = FORMAT
    run: str
    iteration: int = Field(ge=0)
    stage: str
    key: str = Field(description="what must be equal for the stage to count as finished")
    policy_version: int = Field(
        ge=0,
        description="the weights that were played, trained or published, or that played its data",
    )
    shards: tuple[ShardEntry, ...] = ()
    outputs: dict[str, Any] = Field(default_factory=dict, description="small results, JSON")
    metrics: dict[str, float] = Field(default_factory=dict)
    digest: str = ""

    def sealed(self) -> Manifest:
        """A copy with its digest filled in. Raises `ValueError` while a checksum is pending."""
        pending = [entry.file for entry in self.shards if not entry.checksum]
        if pending:
            raise ValueError(
                f"the checksum of {pending[0]} is pending: complete a shard before its manifest "
                "is sealed"
            )
        return self.model_copy(update={"digest": self.content_digest()})

    def content_digest(self) -> str:
        """sha256 over everything but the digest itself."""
        content = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def data_digest(self) -> str:
        """sha256 over the data alone: key, rows, checksums, outputs; equal for equal results."""
        shards = [(s.rows, s.row_ids, s.row_lengths, s.checksum) for s in self.shards]
        content = [self.stage, self.iteration, self.key, shards, self.outputs.get("digest")]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    @property
    def tensor_bytes(self) -> int:
        """Bytes that stayed in shared memory instead of passing through the controller."""
        return sum(entry.body[1] for entry in self.shards)

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


def sealed_path(run_directory: Path, iteration: int, stage: str) -> Path:
    """Return the path of a stage's sealed manifest."""
    return run_directory / "iterations" / f"{iteration:06d}" / f"{stage}.json"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises `ManifestError` when it is missing, not of this format, or
    its digest does not match."""
    try:
        raw = read_file(path)
    except OSError as error:
        raise ManifestError(f"the manifest {path} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(raw)
        return parse_manifest(content)
    except (ValueError, RecursionError, ManifestError) as error:
        other = isinstance(error, ManifestError) and _other_format(content) is not None
        trouble = "is of another version" if other else "is damaged"
        raise ManifestError(
            f"the manifest {path} {trouble} ({str(error).splitlines()[0]}); delete it and its "
            "stage is repeated on resume"
        ) from error


def await_manifest(path: Path, digest: str, seconds: float) -> Manifest:
    """The manifest of this digest, as soon as it is seen there: a network file system may show what
    another host has written some seconds later. Raises `ManifestError`."""
    limit = time.monotonic() + seconds
    while True:
        try:
            manifest = read_manifest(path)
            if manifest.digest == digest:
                return manifest
            problem = ManifestError(f"{path} is another manifest than the one that was sealed")
        except ManifestError as error:
            problem = error
        if time.monotonic() >= limit:
            raise problem
        time.sleep(_LOOK_SECONDS)


def parse_manifest(raw: Any) -> Manifest:
    """A manifest from plain JSON, checked against its digest. Raises `ManifestError`."""
    other = _other_format(raw)
    if other is not None:
        raise ManifestError(f"it has format {other}, this version reads {FORMAT}")
    try:
        manifest = Manifest.model_validate(raw)
        digest = manifest.content_digest()
    except ValueError as error:
        raise ManifestError(f"it is no manifest: {str(error).splitlines()[0]}") from error
    if manifest.digest != digest:
        raise ManifestError("its digest does not match its content")
    return manifest


def _other_format(raw: Any) -> str | None:
    """The format of a manifest that another version of EARL wrote."""
    found = raw.get("format") if isinstance(raw, dict) else None
    kind = FORMAT.rpartition("/")[0] + "/"
    named = isinstance(found, str) and found.startswith(kind) and found != FORMAT
    return str(found) if named else None


def _integers(values: tuple[int, ...]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise ManifestError("a manifest holds a number beyond 64 bits") from error

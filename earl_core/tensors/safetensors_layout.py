"""The safetensors container: header, dtype codes, where each tensor's bytes lie.

Only what writing in place and mapping need; format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from earl_core.tensors.errors import WeightsError

DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

# The first tensor begins at a multiple of this, so that vector loads are aligned.
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorPlace:
    """dtype, shape and byte range [start, stop) of one tensor, counted from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FileLayout:
    """A file that is still to be written: its first bytes, tensor places, total size."""

    prefix: bytes
    places: dict[str, TensorPlace]
    total_bytes: int


def plan_layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> FileLayout:
    """Lay out a file. Wide dtypes come first, so that every tensor is aligned to its elements."""
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    ranges: dict[str, tuple[int, int]] = {}
    for name in order:
        dtype, shape = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        ranges[name] = (offset, offset + size)
        header[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    prefix = len(text).to_bytes(8, "little") + text
    places = {
        name: TensorPlace(*tensors[name], len(prefix) + start, len(prefix) + stop)
        for name, (start, stop) in ranges.items()
    }
    return FileLayout(prefix, places, len(prefix) + offset)


def open_file(path: Path, size: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a file, mapped without a copy, and copy-on-write: a stray write never reaches
    the file. While one of them is alive, the memory of a published file is not used again.

    size: the bytes that the file must have. Raises `WeightsError` for a file that is damaged or has
    another size, `OSError` for one that cannot be opened.
    """
    descriptor = _open_leased(path)
    try:
        found = os.fstat(descriptor).st_size
        if size is not None and found != size:
            raise WeightsError(
                f"{path} has {found} bytes, the manifest says {size}: it is not the file that was "
                "published"
            )
        if found < 8:
            raise WeightsError(f"{path} is not a safetensors file: it has {found} bytes")
        # The mapping keeps a copy of the descriptor, and with it the lease.
        mapping = mmap.mmap(descriptor, found, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return tensors_in(mapping, path)


def tensors_in(mapping: mmap.mmap | memoryview, path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a mapped file of 8 bytes or more, not to be written where the mapping cannot
    be. Raises `WeightsError` where it is damaged."""
    found = len(mapping)
    length = int.from_bytes(mapping[:8], "little")
    if length > min(found - 8, _MAX_HEADER_BYTES):
        raise WeightsError(f"{path} is damaged: its header claims {length} bytes")
    try:
        header = json.loads(bytes(mapping[8 : 8 + length]))
        header.pop("__metadata__", None)
        places = {name: _place(entry, 8 + length, found) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is damaged: its header cannot be read ({error})") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return {name: view(mapping, place) for name, place in places.items()}


def _open_leased(path: Path) -> int:
    """A descriptor under a lease, which protects a published file from being released.

    The lease lasts until the descriptor and every mapping made through it are gone, so also when
    the process is killed. Raises `FileNotFoundError` when the file was released meanwhile.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Between opening and locking it may have been released and used again.
        there = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        there = False
    except OSError:
        # A file system without locks holds models, not published weights.
        there = True
    if not there:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "the file was released", path)
    return descriptor


def _place(entry: Mapping[str, object], base: int, file_bytes: int) -> TensorPlace:
    dtype = DTYPES[str(entry["dtype"])]
    shape = tuple(int(size) for size in entry["shape"])  # type: ignore[attr-defined]
    start, stop = (base + int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
    if not base <= start <= stop <= file_bytes or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor bytes {start}-{stop} do not fit shape {shape} or the file")
    return TensorPlace(dtype, shape, start, stop)


def view(mapping: mmap.mmap | memoryview, place: TensorPlace) -> torch.Tensor:
    """The tensor's own bytes in the mapping, without a copy; it keeps the mapping alive."""
    if place.stop == place.start:
        return torch.empty(place.shape, dtype=place.dtype)
    if place.start % place.dtype.itemsize:
        # A foreign writer packed it unaligned; only then is a copy needed.
        raw = torch.frombuffer(bytearray(mapping[place.start : place.stop]), dtype=torch.uint8)
    else:
        raw = torch.frombuffer(
            mapping, dtype=torch.uint8, count=place.stop - place.start, offset=place.start
        )
    return raw.view(place.dtype).view(place.shape)

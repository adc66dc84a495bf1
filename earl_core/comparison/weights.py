"""Tensors in which two checkpoints differ, read from their files without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from earl_core.system.errors import EarlError

_NUMBERS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_LONGEST_HEADER = 100_000_000


class TensorDifference(NamedTuple):
    """tensors: how many both have. differing: names of those that are not equal bit by bit, or that
    one has alone. most: the largest difference of two numbers, None where that was not computed.
    first: the first element that differs of the first of them."""

    tensors: int
    differing: list[str]
    first: int | None
    most: float | None


def compare_tensors(one: Path, other: Path) -> TensorDifference:
    """Compare the safetensors files of two directories, without those of what they hold below.
    Raises `EarlError` for a file that is none, `OSError`."""
    sides = [
        {name: place for file in sorted(folder.glob("*.safetensors")) for name, place in _in(file)}
        for folder in (one, other)
    ]
    differing, first, most = [], None, None
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        if any(name not in side for side in sides):
            differing.append(name)
            continue
        raw = [side[name].bytes() for side in sides]
        if np.array_equal(raw[0], raw[1]):
            continue
        differing.append(name)
        numbers = [side[name].numbers(each) for side, each in zip(sides, raw, strict=True)]
        if numbers[0].shape == numbers[1].shape:
            with np.errstate(all="ignore"):
                apart = np.abs(numbers[0].astype(np.float64) - numbers[1].astype(np.float64))
            if first is None:
                # By their bits: 0.0 and -0.0 are equal numbers.
                first = int(np.flatnonzero(raw[0] != raw[1])[0]) * numbers[0].size // raw[0].size
            most = max(most or 0.0, float(np.nanmax(apart, initial=0.0)))
    return TensorDifference(len(sides[0].keys() & sides[1].keys()), differing, first, most)


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    begin: int
    end: int

    def bytes(self) -> np.ndarray:
        return np.fromfile(self.file, np.uint8, self.end - self.begin, offset=self.begin)

    def numbers(self, raw: np.ndarray) -> np.ndarray:
        if self.dtype == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(_NUMBERS.get(self.dtype, np.uint8))


def _in(file: Path) -> Iterator[tuple[str, _Tensor]]:
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            start = 8 + length
            found = [
                (name, _Tensor(file, str(each["dtype"]), *(start + int(at) for at in spans)))
                for name, each in sorted(header.items())
                for spans in [each["data_offsets"]]
            ]
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise EarlError(f"{file} is no safetensors file: {error}") from error
    yield from found

"""The digest of a model's weights, by which an adapter knows its base. Imports no torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from earl_core.pretrained.model_directory import read_header, weight_files
from earl_core.system.errors import ConfigError

_THREADS = 8  # more read memory no faster


def combined(tensors: Mapping[str, tuple[str, Sequence[int], str]]) -> str:
    """xxh3_128 over names, dtypes (by safetensors' codes), shapes and hashes of tensors, by name;
    32 hex digits."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        code, shape, value = tensors[name]
        state.update(f"{name}|{code}|{','.join(map(str, shape))}|{value}|".encode())
    return state.hexdigest()


def adapted_files(directory: Path) -> list[Path]:
    """The files with the weights that an adapter is trained beside. Raises `ConfigError` where
    there are none."""
    if files := weight_files(directory):
        return files
    raise ConfigError(
        f"{directory} holds no safetensors weights, beside which an adapter could be trained: "
        "copy model.safetensors into it, or correct model.path"
    )


def stored_digest(directory: Path) -> str:
    """The digest of the tensors in the files of a model directory, all bytes of which are read.
    Raises `ConfigError` for files that cannot be read, or none."""
    files = adapted_files(directory)
    now = {each: each.stat() for each in files}
    return _digest_of(tuple((each, now[each].st_mtime_ns, now[each].st_size) for each in files))


@cache
def _digest_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    return combined({name: found for file, *_ in files for name, found in _hashed(file)})


def _hashed(file: Path) -> Iterator[tuple[str, tuple[str, Sequence[int], str]]]:
    header = read_header(file)
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as content,
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        begin = 8 + int.from_bytes(content[:8], "little")

        def hashed(entry: Mapping[str, Any]) -> str:
            start, stop = entry["data_offsets"]
            with content[begin + start : begin + stop] as own:
                return xxhash.xxh3_128_hexdigest(own)

        entries = {name: each for name, each in header.items() if name != "__metadata__"}
        for (name, each), value in zip(
            entries.items(), threads.map(hashed, entries.values()), strict=True
        ):
            yield name, (each["dtype"], each["shape"], value)

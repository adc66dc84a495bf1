"""The content of demonstrations, by which a run notices that they have changed."""

from __future__ import annotations

import re

import xxhash

from earl_core.system.import_path import import_package

CONTENT = "content"
"""Among the outputs of a stage that demonstrates: the digest of the data that it took from."""

_DATA = re.compile(r"\.(jsonl|parquet|arrow)(\.|$)")


def content_digest(place: str) -> str:
    """xxh3_128 over the data files of a data set, in hex: a file, a glob, or a directory with all
    below it, on any storage that fsspec reads. Raises `OSError`."""
    files, root = import_package("fsspec.core", "fsspec").url_to_fs(place)
    names = files.glob(root) if "*" in root else files.find(root)
    state = xxhash.xxh3_128()
    for name in sorted(name for name in names if _DATA.search(name)):
        state.update(f"{name}|{files.size(name)}|".encode())
        with files.open(name, "rb") as stream:
            while piece := stream.read(1 << 24):
                state.update(piece)
    return state.hexdigest()

"""The content of demonstrations, by which a run notices that they have changed."""

from __future__ import annotations

import xxhash

from earl_core.environments.adapters.data_set import data_format, rows_of
from earl_core.system.import_path import import_package

CONTENT = "content"
"""Among the outputs of a stage that demonstrates: the digest of the data that it took from."""


def content_digest(place: str) -> str:
    """xxh3_128 over the data files of a data set, in hex: a file, a glob, or a directory with all
    below it, on any storage that fsspec reads. Raises `OSError`, also where no file holds rows."""
    files, root = import_package("fsspec.core", "fsspec").url_to_fs(place)
    if "*" in root:
        names = [name for name in files.glob(root) if data_format(name)]
    else:
        found = files.find(root)
        # Files of Arrow are those of a directory that `datasets` saved.
        names = [name for name in found if name.endswith(".arrow")] or rows_of(found)
    if not names:
        raise FileNotFoundError(f"{place!r} has no file with demonstrations")
    state = xxhash.xxh3_128()
    for name in sorted(names):
        state.update(f"{name}|{files.size(name)}|".encode())
        with files.open(name, "rb") as stream:
            while piece := stream.read(1 << 24):
                state.update(piece)
    return state.hexdigest()

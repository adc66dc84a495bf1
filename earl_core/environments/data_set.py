"""Rows of a data set on any storage, one made into Python objects at a time.

A directory that `datasets` saved and a local .jsonl file stay mapped files: all hosts share their
pages. Compressed and remote files are held as they are, Parquet as Arrow columns.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

Row = dict[str, Any]

_FORMATS = ("jsonl", "parquet")
_SPLITS = ("train", "validation", "valid", "dev", "test")
"""Words in file names that tell that a directory has splits."""


class Rows(Protocol):
    """The rows of one file, or of several files of one kind."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def differing(self) -> Iterator[Row]:
        """The rows from the first on, but no more where the others have the same columns."""
        ...


@lru_cache(maxsize=8)
def read_rows(path: str, split: str | None, columns: tuple[str, ...]) -> DataSet:
    """Opens a data set through fsspec; once per process, every episode shares it.

    path: a .jsonl or .parquet file, compressed or not; a glob of such files, or a directory that
        holds some; or a directory that `datasets` saved with `save_to_disk`.
    split: its split, or that of a directory whose file names tell splits, like train-0001.parquet.
    columns: what each row must have.
    Raises ConfigError when the data is missing, empty or malformed.
    """
    storage = import_package("fsspec.core", "fsspec")
    try:
        files, root = storage.url_to_fs(path)
        parts = _open(files, root, path, split)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the prompts at {path!r} cannot be read: {type(error).__name__}: {error}",
            remedy="check the path",
        ) from error
    rows = DataSet([part for part in parts if len(part)])
    if not len(rows):
        raise ConfigError(f"the data set {path!r} holds no rows: it needs at least one")
    rows.check(columns, path)
    return rows


class DataSet:
    """The rows of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]

    def check(self, columns: Sequence[str], path: str) -> None:
        """Raises ConfigError when a row lacks one of the columns, or is malformed."""
        for part, end in zip(self._parts, self._ends, strict=True):
            for index, row in enumerate(part.differing(), end - len(part)):
                for column in columns:
                    if column not in row:
                        raise ConfigError(
                            f"row {index} of {path} has no column {column!r}; it has "
                            f"{', '.join(row)}",
                            remedy="correct the option that names it",
                        )


class _JsonLines:
    """buffer: the text, which is parsed row by row."""

    def __init__(self, buffer: Any, name: str) -> None:
        self._buffer, self._name = buffer, name
        self._lines, self._ends = array("Q"), array("Q", [0])
        start, line = 0, 0
        while start < len(buffer):
            line += 1
            found = buffer.find(b"\n", start)
            end = len(buffer) if found < 0 else found + 1
            if buffer[start:end].isspace():
                # The row before keeps its empty lines.
                self._ends[-1] = end
            else:
                self._lines.append(line)
                self._ends.append(end)
            start = end

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        line = self._lines[index]
        try:
            row = json.loads(self._buffer[self._ends[index] : self._ends[index + 1]])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {line} of {self._name} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"line {line} of {self._name} is no JSON object, like {{...}}")
        return row

    def differing(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


class _ArrowRows:
    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def differing(self) -> Iterator[Row]:
        yield self[0]


def _open(files: Any, root: str, path: str, split: str | None) -> list[Rows]:
    if "*" not in root and files.isdir(root):
        if files.exists(f"{root}/dataset_dict.json"):
            splits = json.loads(files.cat_file(f"{root}/dataset_dict.json"))["splits"]
            return _saved(files, f"{root}/{_chosen(splits, split, path)}")
        if files.exists(f"{root}/state.json"):
            _chosen([], split, path)
            return _saved(files, root)
        names = [name for name in files.find(root) if _format(name)]
    elif "*" in root:
        names = files.glob(root)
    else:
        _chosen([], split, path)
        names = [root]
    if not names:
        raise ConfigError(f"the option path is {path!r}, where no .jsonl or .parquet file lies")
    return [_read(files, name) for name in _of_split(sorted(names), root, path, split)]


def _saved(files: Any, folder: str) -> list[Rows]:
    """What `datasets` saved: its files hold Arrow IPC streams."""
    pa = import_package("pyarrow", "pyarrow")
    state = json.loads(files.cat_file(f"{folder}/state.json"))
    tables: list[Rows] = []
    for each in state["_data_files"]:
        name = f"{folder}/{each['filename']}"
        source = pa.memory_map(name) if _local(files) else pa.py_buffer(files.cat_file(name))
        tables.append(_ArrowRows(pa.ipc.open_stream(source).read_all()))
    return tables


def _read(files: Any, name: str) -> Rows:
    kind = _format(name)
    if kind is None:
        raise ConfigError(
            f"the option path names {name!r}: name files that end in .jsonl or .parquet, or a "
            "directory that datasets saved"
        )
    if kind == "parquet":
        pq = import_package("pyarrow.parquet", "pyarrow")
        with files.open(name, "rb") as stream:
            return _ArrowRows(pq.read_table(stream))
    compressed = not name.endswith(".jsonl")
    with files.open(name, "rb", compression="infer") as stream:
        if compressed or not _local(files) or not files.size(name):
            return _JsonLines(stream.read(), name)
        return _JsonLines(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), name)


def _local(files: Any) -> bool:
    return "file" in ([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def _format(name: str) -> str | None:
    """jsonl or parquet, by the end of the name; that of a compression may follow jsonl."""
    from fsspec.utils import infer_compression

    stem, _, end = name.lower().rpartition(".")
    if infer_compression(name):
        end = stem.rpartition(".")[2]
        return end if end == "jsonl" else None
    return end if end in _FORMATS else None


def _of_split(names: list[str], root: str, path: str, split: str | None) -> list[str]:
    """The files whose names hold the split as a word. One file alone needs none."""
    if len(names) == 1 and split is None:
        return names
    start = len(root.partition("*")[0].rpartition("/")[0] if "*" in root else root)
    words = {name: re.split(r"[^A-Za-z0-9]+", name[start:]) for name in names}
    told = [each for each in _SPLITS if any(each in found for found in words.values())]
    if split is None:
        if len(told) > 1:
            _chosen(told, None, path)
        return names
    chosen = [name for name in names if split in words[name]]
    if not chosen:
        _chosen(told, split, path)
    return chosen


def _chosen(splits: Sequence[str], split: str | None, path: str) -> str | None:
    """The split to take, None where there are none. Raises ConfigError."""
    if split is None and len(splits) <= 1:
        return next(iter(splits), None)
    if split in splits:
        return split
    if not splits:
        raise ConfigError(
            f"the data set {path!r} has no splits", remedy="drop the option split, or name another"
        )
    raise ConfigError(
        f"the data set {path!r} has the splits {', '.join(splits)}",
        remedy="name one of them in the option split",
    )

"""Rows of a data set on any storage, one made into Python objects at a time.

A directory that `datasets` saved and a local .jsonl file stay mapped files: all hosts share their
pages. Compressed and remote files are held as they are, Parquet as Arrow columns.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import stat
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from earl_core.environments.adapters.row_files import (
    ArrowRows,
    CsvRows,
    JsonArray,
    JsonLines,
    Row,
    RowRules,
    Rows,
)
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

logger = logging.getLogger(__name__)

_TEXTS = ("jsonl", "json", "csv")
_FORMATS = (*_TEXTS, "parquet")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
_SPLITS = ("train", "validation", "valid", "dev", "test")
"""Words in file names that tell that a directory has splits."""

_MOST_TIMES = 100
"""A compressed file may grow so many times: a text of ours grows 20 times, a bomb thousands."""
_LITTLE = 64 << 20
_MOST_UNKNOWN = 4 << 30
"""Bytes of a file whose storage does not tell its size."""
_PIECE = 16 << 20


@lru_cache(maxsize=8)
def read_rows(path: str, split: str | None, rules: RowRules, leave_out: bool = False) -> DataSet:
    """Opens a data set through fsspec; once per process, every episode shares it.

    path: a .jsonl, .json, .csv or .parquet file, texts compressed or not; a glob of such files, or
        a directory that holds some (of .json and .csv where it has no others); or a directory that
        `datasets` saved with `save_to_disk`.
    split: its split, or that of a directory whose file names tell splits, like train-0001.parquet.
    rules: what each row must be.
    leave_out: rows that are not are left out, and their number is logged.
    Raises ConfigError when the data is missing, empty or malformed, or has a row that is not so.
    """
    storage = import_package("fsspec.core", "fsspec")
    try:
        files, root = storage.url_to_fs(path)
        parts = _open(files, root, path, split)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the data set {path!r} cannot be read: {type(error).__name__}: {error}",
            remedy="check the path",
        ) from error
    rows = DataSet([part for part in parts if len(part)])
    if not len(rows):
        raise ConfigError(f"the data set {path!r} holds no rows: it needs at least one")
    return rows.usable(rules, path, leave_out)


class DataSet:
    """The rows of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Rows], left_out: Sequence[int] = ()) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        # Of each row that is left out, how many are left before it.
        self._kept = array("Q", (row - number for number, row in enumerate(left_out)))

    def __len__(self) -> int:
        return (self._ends[-1] if self._ends else 0) - len(self._kept)

    def __getitem__(self, index: int) -> Row:
        part, row = self._at(index)
        return part[row]

    def place(self, index: int) -> str:
        """Name the place where people find a row: its number, from 0 on, and its file."""
        part, row = self._at(index)
        return part.place(row)

    def _at(self, index: int) -> tuple[Rows, int]:
        index += bisect_right(self._kept, index)
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def usable(self, rules: RowRules, path: str, leave_out: bool) -> DataSet:
        """The rows that the rules allow; all are looked at. Raises ConfigError."""
        found: list[int] = []
        first = ""
        for part, end in zip(self._parts, self._ends, strict=True):
            for index, fault in part.faults(rules):
                if not leave_out:
                    raise ConfigError(
                        f"{part.place(index)} {fault}",
                        remedy="correct the option that names the column or the format, or the "
                        "row, or leave such rows out by unusable_rows: leave_out",
                    )
                first = first or f"{part.place(index)} {fault}"
                found.append(end - len(part) + index)
        if not found:
            return self
        if len(found) == len(self):
            raise ConfigError(f"no row of {path!r} can be used; {first}", remedy="correct them")
        logger.warning(
            "%d of the %d rows of %s are left out; the first: %s",
            len(found), len(self), path, first,
        )  # fmt: skip
        return DataSet(self._parts, found)


def _open(files: Any, root: str, path: str, split: str | None) -> list[Rows]:
    if "*" not in root and files.isdir(root):
        if files.exists(f"{root}/dataset_dict.json"):
            splits = _told(files, f"{root}/dataset_dict.json")["splits"]
            return _saved(files, f"{root}/{_chosen(splits, split, path)}")
        if files.exists(f"{root}/state.json"):
            _chosen([], split, path)
            return _saved(files, root)
        names = rows_of(files.find(root))
    elif "*" in root:
        names = files.glob(root)
    else:
        _chosen([], split, path)
        names = [root]
    if not names:
        raise ConfigError(f"{path!r} holds no .jsonl, .json, .csv or .parquet file")
    return [_read(files, name) for name in _of_split(sorted(names), root, path, split)]


def _saved(files: Any, folder: str) -> list[Rows]:
    """Open the tables that `datasets` saved: its files hold Arrow IPC streams."""
    pa = import_package("pyarrow", "pyarrow")
    state = _told(files, f"{folder}/state.json")
    tables: list[Rows] = []
    for each in state["_data_files"]:
        name = f"{folder}/{each['filename']}"
        _check_regular(files, name)
        source = pa.memory_map(name) if _local(files) else pa.py_buffer(files.cat_file(name))
        tables.append(ArrowRows(pa.ipc.open_stream(source).read_all(), name))
    return tables


def _told(files: Any, name: str) -> Any:
    """Read what `datasets` wrote of its files. Raises ConfigError for what is no such text."""
    _check_regular(files, name)
    with files.open(name, "rb") as stream:
        return json.loads(_read_whole(stream, name, _LITTLE))


def _read(files: Any, name: str) -> Rows:
    kind = data_format(name)
    if kind is None:
        raise ConfigError(
            f"{name!r} has no known format: name files that end in .jsonl, .json, .csv or "
            ".parquet, or a "
            "directory that datasets saved"
        )
    _check_regular(files, name)
    size = files.size(name)
    if kind == "parquet":
        with files.open(name, "rb") as stream:
            return ArrowRows(_parquet(stream, name, size), name)
    compressed = not name.lower().endswith(f".{kind}")
    with files.open(name, "rb", compression="infer") as stream:
        if kind == "jsonl" and size and not compressed and _local(files):
            return JsonLines(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), name)
        most = size if size is not None else _MOST_UNKNOWN
        whole = _read_whole(stream, name, _grown(most) if compressed else most)
    if kind == "jsonl":
        return JsonLines(whole, name)
    try:
        text = whole.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 ({error})", remedy="save it as UTF-8") from error
    if kind == "csv":
        return CsvRows(text, name)
    # Some have a line of JSON for each row under this name, too.
    return JsonArray(text, name) if text.lstrip().startswith("[") else JsonLines(whole, name)


def rows_of(names: Sequence[str]) -> list[str]:
    """The files of a directory that hold its rows: beside others .json and .csv describe them."""
    kinds = {name: kind for name in names if (kind := data_format(name))}
    rows = [name for name, kind in kinds.items() if kind in ("jsonl", "parquet")]
    return rows or [name for name in kinds if name.rpartition("/")[2] not in _DESCRIPTIONS]


def _check_regular(files: Any, name: str) -> None:
    """Raise ConfigError for what a local path names and is no file: a FIFO is waited for."""
    if _local(files) and not stat.S_ISREG(os.stat(name).st_mode):
        raise ConfigError(f"{name} is no regular file", remedy="name one")


def _grown(size: int) -> int:
    return max(_LITTLE, _MOST_TIMES * size)


def _read_whole(stream: Any, name: str, most: int) -> bytes:
    """Raises ConfigError for more than `most` bytes, of which no more are held."""
    whole = bytearray()
    while piece := stream.read(min(_PIECE, most + 1 - len(whole))):
        whole += piece
        if len(whole) > most:
            raise _too_large(name, most)
    return bytes(whole)


def _parquet(stream: Any, name: str, size: int | None) -> Any:
    """A file's table. Raises ConfigError when it grows beyond bounds."""
    pa = import_package("pyarrow", "pyarrow")
    pq = import_package("pyarrow.parquet", "pyarrow")
    most = max(_grown(size or 0), 1 << 30)
    file = pq.ParquetFile(stream)
    batches, held = [], 0
    for batch in file.iter_batches():
        held += batch.nbytes
        if held > most:
            raise _too_large(name, most)
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow)


def _too_large(name: str, most: int) -> ConfigError:
    return ConfigError(
        f"{name} holds more than {most / 2**20:,.0f} MiB once it is decompressed, over "
        f"{_MOST_TIMES} times its size",
        remedy="store it decompressed if that is right",
    )


def _local(files: Any) -> bool:
    return "file" in ([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def data_format(name: str) -> str | None:
    """One of `_FORMATS`, by the end of the name; that of a compression may follow a text's."""
    from fsspec.utils import infer_compression

    stem, _, end = name.lower().rpartition(".")
    if infer_compression(name):
        end = stem.rpartition(".")[2]
        return end if end in _TEXTS else None
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

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_FORMATS = ("jsonl", "parquet")
_SPLITS = ("train", "validation", "valid", "dev", "test")
"""Words in file names that tell that a directory has splits."""

_MOST_TIMES = 100
"""A compressed file may grow so many times: a text of ours grows 20 times, a bomb thousands."""
_LITTLE = 64 << 20
_MOST_UNKNOWN = 4 << 30
"""Bytes of a file whose storage does not tell its size."""
_AT_ONCE = 1000
"""Lines that are parsed together."""
_PIECE = 16 << 20


class RowRules(Protocol):
    """The properties that each row must have."""

    def fault(self, row: Mapping[str, Any]) -> str:
        """Return the fault of a row, "" for none."""
        ...

    def suspects(self, table: Any) -> Sequence[int] | None:
        """Rows of an Arrow table among which are all that have a fault; None: look at all."""
        ...


class Rows(Protocol):
    """The rows of one file, or of several files of one kind."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def faults(self, rules: RowRules) -> Iterator[tuple[int, str]]:
        """The rows that cannot be used, and why."""
        ...

    def place(self, index: int) -> str:
        """Name the place where people find a row."""
        ...


@lru_cache(maxsize=8)
def read_rows(path: str, split: str | None, rules: RowRules, leave_out: bool = False) -> DataSet:
    """Opens a data set through fsspec; once per process, every episode shares it.

    path: a .jsonl or .parquet file, compressed or not; a glob of such files, or a directory that
        holds some; or a directory that `datasets` saved with `save_to_disk`.
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
                        remedy="correct the option that names the column, or the row, or leave "
                        "such rows out by unusable_rows: leave_out",
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


class _JsonLines:
    """buffer: the text, which is parsed row by row."""

    def __init__(self, buffer: Any, name: str) -> None:
        self._buffer, self._name = buffer, name
        begin = buffer[:4]
        if b"\0" in begin or begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ConfigError(f"{name} is not UTF-8 (it is UTF-16)", remedy="save it as UTF-8")
        start, line = 3 if begin[:3] == b"\xef\xbb\xbf" else 0, 0
        self._lines, self._ends = array("Q"), array("Q", [start])
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

    def faults(self, rules: RowRules) -> Iterator[tuple[int, str]]:
        for start in range(0, len(self), _AT_ONCE):
            for index, row in enumerate(self._several(start), start):
                if fault := rules.fault(row):
                    yield index, fault

    def place(self, index: int) -> str:
        return f"row {index} of {self._name} (line {self._lines[index]})"

    def _several(self, start: int) -> Iterator[Row]:
        """Rows parsed together, which is three times as fast; one by one where that fails."""
        end = min(start + _AT_ONCE, len(self))
        text = self._buffer[self._ends[start] : self._ends[end]].strip()
        try:
            rows = json.loads(b"[" + text.replace(b"\n", b",") + b"]")
            whole = len(rows) == end - start and all(type(row) is dict for row in rows)
        except (ValueError, RecursionError):
            whole = False
        return iter(rows) if whole else (self[index] for index in range(start, end))


class _ArrowRows:
    """Columns of a file. name: the file's."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.place(index)} holds a text that is not UTF-8") from error
        return row

    def faults(self, rules: RowRules) -> Iterator[tuple[int, str]]:
        suspects = rules.suspects(self._table)
        rows = self._all() if suspects is None else self._single(suspects)
        for index, row in rows:
            fault = rules.fault(row) if row is not None else "holds a text that is not UTF-8"
            if fault:
                yield index, fault

    def _all(self) -> Iterator[tuple[int, Row | None]]:
        for start in range(0, len(self), _AT_ONCE):
            several = self._table.slice(start, _AT_ONCE)
            try:
                yield from enumerate(several.to_pylist(), start)
            except UnicodeDecodeError:
                yield from self._single(range(start, start + len(several)))

    def _single(self, indices: Iterable[int]) -> Iterator[tuple[int, Row | None]]:
        for index in indices:
            try:
                yield index, self[index]
            except ConfigError:
                yield index, None

    def place(self, index: int) -> str:
        return f"row {index} of {self._name}"


def _open(files: Any, root: str, path: str, split: str | None) -> list[Rows]:
    if "*" not in root and files.isdir(root):
        if files.exists(f"{root}/dataset_dict.json"):
            splits = _told(files, f"{root}/dataset_dict.json")["splits"]
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
        raise ConfigError(f"{path!r} holds no .jsonl or .parquet file")
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
        tables.append(_ArrowRows(pa.ipc.open_stream(source).read_all(), name))
    return tables


def _told(files: Any, name: str) -> Any:
    """Read what `datasets` wrote of its files. Raises ConfigError for what is no such text."""
    _check_regular(files, name)
    with files.open(name, "rb") as stream:
        return json.loads(_read_whole(stream, name, _LITTLE))


def _read(files: Any, name: str) -> Rows:
    kind = _format(name)
    if kind is None:
        raise ConfigError(
            f"{name!r} has no known format: name files that end in .jsonl or .parquet, or a "
            "directory that datasets saved"
        )
    _check_regular(files, name)
    size = files.size(name)
    if kind == "parquet":
        with files.open(name, "rb") as stream:
            return _ArrowRows(_parquet(stream, name, size), name)
    compressed = not name.endswith(".jsonl")
    with files.open(name, "rb", compression="infer") as stream:
        if compressed or not _local(files) or not size:
            most = size if size is not None else _MOST_UNKNOWN
            return _JsonLines(_read_whole(stream, name, _grown(most) if compressed else most), name)
        return _JsonLines(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), name)


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

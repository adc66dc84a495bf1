"""The rows of one file of a data set, one made into Python objects at a time."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

Row = dict[str, Any]

_AT_ONCE = 1000
"""Lines that are parsed together."""


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


class JsonLines:
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


class ArrowRows:
    """Columns of a file. name: the file's."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name
        readers = ((field.name, _reader(field.type)) for field in table.schema)
        self._readers = {name: reader for name, reader in readers if reader}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.place(index)} holds a text that is not UTF-8") from error
        return row | {name: reader(row[name]) for name, reader in self._readers.items()}

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


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Puts numbers of single or half precision into a value of an Arrow type as somebody wrote
    them: 0.1, and not 0.10000000149011612, which no answer equals. None where there are none. Lists
    are left as they are: long ones are vectors, and no answer."""
    types = import_package("pyarrow.types", "pyarrow")
    if types.is_struct(kind):
        parts = {each.name: reader for each in kind if (reader := _reader(each.type))}
        return partial(_parts_as_written, parts) if parts else None
    if types.is_float32(kind):
        return partial(_as_written, "f", 9)
    return partial(_as_written, "e", 5) if types.is_float16(kind) else None


def _parts_as_written(parts: dict[str, Callable[[Any], Any]], value: Any) -> Any:
    return value and value | {name: reader(value[name]) for name, reader in parts.items()}


def _as_written(code: str, most: int, value: Any) -> Any:
    """code: of `struct`. most: digits that tell all numbers of it apart."""
    if not isinstance(value, float) or value.is_integer() or not math.isfinite(value):
        return value
    stored = struct.pack(code, value)
    near = (float(f"{value:.{digits}g}") for digits in range(1, most + 1))
    return next(each for each in near if struct.pack(code, each) == stored)


class JsonArray:
    """A text that holds one list of objects, each parsed when it is asked for."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._ends = array("Q")
        self._starts = array("Q")
        decoder, at = json.JSONDecoder(), _after_space(text, 0) + 1
        while True:
            at = _after_space(text, at)
            if text[at : at + 1] == "]" and not self._ends:
                break
            try:
                row, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{self.place(len(self))} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{self.place(len(self))} is no JSON object, like {{...}}")
            self._starts.append(at)
            self._ends.append(end)
            at = _after_space(text, end)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise ConfigError(f"{name} has neither ',' nor ']' behind its row {len(self) - 1}")
            at += 1
        if text[at + 1 :].strip():
            raise ConfigError(f"{name} goes on behind its list")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Row:
        row: Row = json.loads(self._text[self._starts[index] : self._ends[index]])
        return row

    def faults(self, rules: RowRules) -> Iterator[tuple[int, str]]:
        return _all_faults(self, rules)

    def place(self, index: int) -> str:
        return f"row {index} of {self._name}"


class CsvRows:
    """A text with a line of names and a line, or several, for each row; all values are texts."""

    def __init__(self, text: str, name: str) -> None:
        self._name, self._rows, self._lines = name, list[list[str]](), array("Q", [0])
        csv.field_size_limit(2**31 - 1)
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            self._names = next(reader, [])
            if not all(self._names) or len(set(self._names)) < len(self._names):
                raise ConfigError(
                    f"the first line of {name} does not name each column once: "
                    f"{', '.join(self._names):.200}"
                )
            self._lines[0] = reader.line_num
            for row in reader:
                if row and len(row) != len(self._names):
                    raise ConfigError(
                        f"{self.place(len(self))} has {len(row)} values for the "
                        f"{len(self._names)} columns that the first line names"
                    )
                if row:
                    self._rows.append(row)
                    self._lines.append(reader.line_num)
                else:
                    self._lines[-1] = reader.line_num
        except csv.Error as error:
            raise ConfigError(f"{self.place(len(self))} is no CSV: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(zip(self._names, self._rows[index], strict=True))

    def faults(self, rules: RowRules) -> Iterator[tuple[int, str]]:
        return _all_faults(self, rules)

    def place(self, index: int) -> str:
        return f"row {index} of {self._name} (line {self._lines[index] + 1})"


def _all_faults(rows: Rows, rules: RowRules) -> Iterator[tuple[int, str]]:
    for index in range(len(rows)):
        if fault := rules.fault(rows[index]):
            yield index, fault


_SPACE = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at

"""Measured throughput and peaks by layout and load: `ProfileTable`, one Parquet file each.

A table belongs to one fingerprint of model, hardware and software. Loads fall into buckets of half
an octave of context and of running requests; a new measurement of a bucket outweighs older ones
exponentially. Where nothing was measured, what was measured near by corrects the roofline.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import xxhash
from pydantic import Field, ValidationError

from earl_core.config.settings import Settings
from earl_core.system.errors import EarlError, InUse
from earl_core.system.files import canonical_json

FORMAT = "earl.profile/1"

_PRIOR = 0.05
"""Weight of the uncorrected roofline against one fresh measurement at the same place."""

_REQUESTS_OCTAVES = 2.0
"""Throughput follows live tokens first: requests must differ by this many octaves to matter as
much as one octave of live tokens."""


class ProfileError(EarlError):
    """A profile file that cannot be used; the message says what to do."""


class ProfilePoint(Settings):
    """One bucket of one layout.

    key: `Candidate.key`. context: tokens of a sequence. requests: sequences offered to an engine,
    or samples of an update. tokens_per_second: of one engine, or of the whole stage in training.
    peak_bytes: on one device, 0 when unknown. weight: measurements it stands for, decayed to
    `iteration`. An out-of-memory says that this load, and any larger, does not fit.
    """

    key: str
    context: float = Field(gt=0)
    requests: float = Field(gt=0)
    tokens_per_second: float = Field(default=0.0, ge=0)
    peak_bytes: float = Field(default=0.0, ge=0)
    out_of_memory: bool = False
    weight: float = Field(default=1.0, gt=0)
    iteration: int = 0

    @property
    def live_tokens(self) -> float:
        """Tokens held at once."""
        return self.context * self.requests

    @property
    def bucket(self) -> tuple[str, int, int]:
        """Layout, and half octaves of context and of requests."""
        context, requests = (round(2 * math.log2(v)) for v in (self.context, self.requests))
        return self.key, context, requests


class ProfileTable(Settings):
    """Points, at most one for each bucket. seconds: what `earl profile` has spent on them."""

    points: tuple[ProfilePoint, ...] = ()
    seconds: float = Field(default=0.0, ge=0)

    def observe(self, point: ProfilePoint, half_life: float) -> ProfileTable:
        """With one more measurement.

        The bucket's older weight halves every `half_life` iterations. A load that has worked after
        all is no longer forbidden, and the other way round.
        """
        kept = {other.bucket: other for other in self.points}
        old = kept.get(point.bucket)
        if old is not None and old.out_of_memory == point.out_of_memory:
            point = _merged(old, point, half_life)
        kept[point.bucket] = point
        return self._with(kept[bucket] for bucket in sorted(kept))

    def without(self, excluded: Callable[[ProfilePoint], bool]) -> ProfileTable:
        """The points that are not excluded."""
        return self._with(p for p in self.points if not excluded(p))

    def _with(self, points: Iterable[ProfilePoint]) -> ProfileTable:
        return ProfileTable(points=tuple(points), seconds=self.seconds)

    def by_key(self) -> dict[str, list[ProfilePoint]]:
        """Points of each layout."""
        found: dict[str, list[ProfilePoint]] = {}
        for point in self.points:
            found.setdefault(point.key, []).append(point)
        return found


def _merged(old: ProfilePoint, new: ProfilePoint, half_life: float) -> ProfilePoint:
    age = max(0, new.iteration - old.iteration)
    kept = old.weight * 0.5 ** (age / half_life)
    total = kept + new.weight
    mean = {
        name: (kept * getattr(old, name) + new.weight * getattr(new, name)) / total
        for name in ("context", "requests", "tokens_per_second")
    }
    peak = max(old.peak_bytes, new.peak_bytes)
    merged = new.model_copy(update={**mean, "weight": total, "peak_bytes": peak})
    # Two halves of a bucket may have a mean that rounds into its neighbour.
    return merged if merged.bucket == new.bucket else new.model_copy(update={"weight": total})


Guess = Callable[[float, float], float]
"""The roofline's tokens/s of a layout at (context, requests)."""


def log_ratio_of(point: ProfilePoint, guess: Guess) -> float | None:
    """log(measured / guessed throughput); None where nothing can be compared."""
    expected = guess(point.context, point.requests)
    if point.out_of_memory or point.tokens_per_second <= 0 or expected <= 0:
        return None
    return math.log(point.tokens_per_second / expected)


class Correction:
    """Measured over guessed throughput of one layout, interpolated between its points.

    Weights fall with the distance in octaves of live tokens and, half as fast, of requests; far
    from every measurement the correction fades to exp(base). base: log of what all layouts of
    the stage have in common (at a load, or everywhere), such as a device that is slower than its
    figures; 0: nothing is known.
    """

    def __init__(
        self, points: Iterable[ProfilePoint], guess: Guess, base: Guess | float = 0.0
    ) -> None:
        self._base = base
        self._points = []
        for point in points:
            log_ratio = log_ratio_of(point, guess)
            if log_ratio is not None:
                place = math.log2(point.live_tokens), math.log2(point.requests)
                self._points.append((*place, min(point.weight, 4.0), log_ratio))

    def __call__(self, context: float, requests: float) -> tuple[float, float]:
        """The factor on the roofline's rate, and how much measurement stands behind it (0 to 1)."""
        base = self._base if isinstance(self._base, float) else self._base(context, requests)
        if not self._points:
            return math.exp(base), 0.0
        live, wide = math.log2(context * requests), math.log2(requests)
        total = summed = 0.0
        for point_live, point_wide, weight, log_ratio in self._points:
            apart = (live - point_live) ** 2 + ((wide - point_wide) / _REQUESTS_OCTAVES) ** 2
            near = weight * math.exp(-0.5 * apart)
            total += near
            summed += near * log_ratio
        summed += _PRIOR * base
        return math.exp(summed / (total + _PRIOR)), total / (total + _PRIOR)


class Common:
    """log(measured / guessed throughput) that a stage's measured layouts have in common at a load:
    a layout that was not measured is no faster or slower for that.

    Each layout counts as much as it was measured there; where none was, all of them alike.
    """

    def __init__(self, measured: Sequence[tuple[Sequence[ProfilePoint], Guess]]) -> None:
        self._found: dict[tuple[float, float], float] = {}
        ratios = [[log_ratio_of(point, guess) for point in points] for points, guess in measured]
        known = [[ratio for ratio in found if ratio is not None] for found in ratios]
        self._everywhere = fmean([fmean(each) for each in known if each] or [0.0])
        self._layouts = [Correction(points, guess, self._everywhere) for points, guess in measured]

    def __call__(self, context: float, requests: float) -> float:
        place = context, requests
        if place not in self._found:
            total, summed = _LITTLE, _LITTLE * self._everywhere
            for layout in self._layouts:
                factor, share = layout(context, requests)
                total, summed = total + share, summed + share * math.log(factor)
            self._found[place] = summed / total
        return self._found[place]


_LITTLE = 0.05


def fingerprint(*parts: Mapping[str, object]) -> str:
    """16 hexadecimal digits of model, hardware and software versions, whatever their key order."""
    return xxhash.xxh3_64_hexdigest(canonical_json(list(parts)))


def table_path(directory: Path, mark: str) -> Path:
    """Where the table of a fingerprint lies."""
    return directory / f"{mark}.parquet"


@contextmanager
def only_writer(directory: Path, mark: str) -> Iterator[None]:
    """Alone in writing the table of a fingerprint, in a directory that is made where it is missing;
    raises `InUse`."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{mark}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise InUse(lock.read().strip() or "unknown") from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def read_table(directory: Path, mark: str) -> ProfileTable:
    """The table of a fingerprint; empty when nothing was measured.

    Raises `ProfileError` for a file that is damaged or of another fingerprint or format.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = table_path(directory, mark)
    if not path.exists():
        return ProfileTable()
    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        if metadata.get(b"format") != FORMAT.encode() or metadata.get(b"mark") != mark.encode():
            raise ProfileError(
                f"the profile {path} is of another format or fingerprint: remove it to measure anew"
            )
        points = tuple(ProfilePoint(**row) for row in table.to_pylist())
        return ProfileTable(points=points, seconds=float(metadata.get(b"seconds", b"0")))
    except ProfileError:
        raise
    # A ValueError: a whole file whose lines are none that we write.
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise ProfileError(
            f"the profile {path} cannot be read ({_sentence(error)}): remove it to measure anew"
        ) from error


def _sentence(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def write_table(directory: Path, mark: str, table: ProfileTable) -> Path:
    """Replace the fingerprint's table atomically; returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(ProfilePoint.model_fields)
    columns = {name: [getattr(point, name) for point in table.points] for name in names}
    types = {"key": pa.string(), "out_of_memory": pa.bool_(), "iteration": pa.int64()}
    schema = pa.schema(
        [pa.field(name, types.get(name, pa.float64()), nullable=False) for name in names],
        metadata={"format": FORMAT, "mark": mark, "seconds": repr(table.seconds)},
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = table_path(directory, mark)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        pq.write_table(pa.table(columns, schema=schema), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path

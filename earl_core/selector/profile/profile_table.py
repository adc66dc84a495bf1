"""Measured throughput and peaks by candidate and load: `ProfileTable`, one Parquet file each.

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
from typing import Any

import xxhash
from pydantic import Field, ValidationError

from earl_core.deployment.stage_deployment import CHECKPOINTING, StageDeployment
from earl_core.system.errors import EarlError, InUse
from earl_core.system.files import canonical_json, write_atomic
from earl_core.system.settings import Settings

FORMAT = "earl.profile/1"

_PRIOR = 0.05
"""Weight of the uncorrected roofline against one fresh measurement at the same place."""

_REQUESTS_OCTAVES = 2.0
"""Throughput follows live tokens first: requests must differ by this many octaves to matter as
much as one octave of live tokens."""


class ProfileError(EarlError):
    """A profile file that cannot be used; the message says what to do."""


class ProfilePoint(Settings):
    """One bucket of one candidate.

    key: `key_of` it. context: tokens of a sequence. requests: sequences offered to an engine,
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

    def at_most(self, context: float, requests: float) -> bool:
        """Tell whether such a load is this one or more: of an engine by the tokens held at once."""
        if self.key.startswith("rollout"):
            return context * requests >= self.live_tokens
        return context >= self.context

    @property
    def bucket(self) -> tuple[str, int, int]:
        """Candidate, and half octaves of context and of requests."""
        context, requests = (round(2 * math.log2(v)) for v in (self.context, self.requests))
        return self.key, context, requests


_PARTS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "shard": "shard",
    "ep": "expert_parallel",
    "threads": "threads",
    "mb": "max_tokens_per_microbatch",
    "checkpointing": "activation_checkpointing",
    "chunk": "logits_chunk_tokens",
    "offload": "offload_optimizer",
}


def key_of(candidate: StageDeployment, devices: int = 0) -> str:
    """The candidate's name in the table, such as `update tp2 mb4096 checkpointing`.

    On GPUs engines do not disturb one another, so their number is no part of it; engines of a CPU
    share its memory bandwidth. A limit on running sequences is part of the load. devices: those of
    the hardware, where training may have fewer.
    """
    parts = [candidate.stage]
    for name, field in _PARTS.items():
        value = getattr(candidate, field)
        if name == "threads" and value > 1:
            parts.append(f"{candidate.replicas}x{value}threads")
        elif value is True or value == "full":
            parts.append(name)
        elif isinstance(value, str):
            parts += [] if value == "none" else [value]
        elif name == "tp" or value != StageDeployment._field_defaults[field]:
            parts.append(f"{name}{value}")
    if candidate.stage != "rollout" and candidate.ranks * candidate.threads < devices:
        parts.append(f"on{candidate.ranks}")
    return " ".join(parts)


def candidate_of_key(key: str, devices: int) -> StageDeployment:
    """Return the candidate that a name in the table stands for on so many devices."""
    stage, *parts = key.split()
    found: dict[str, Any] = {}
    for part in parts:
        name = part.rstrip("0123456789")
        if name.endswith("threads"):
            found["replicas"], found["threads"] = map(int, name[: -len("threads")].split("x"))
        elif name == "on":
            devices = int(part.removeprefix("on"))
        elif name in CHECKPOINTING:
            found["activation_checkpointing"] = name
        elif name == "checkpointing":
            found["activation_checkpointing"] = "full"
        else:
            found[_PARTS[name]] = int(part[len(name) :]) if part != name else True
    candidate = StageDeployment(stage, **found)
    if "replicas" in found:
        return candidate
    return candidate._replace(replicas=max(1, devices // candidate.ranks))


class ProfileTable(Settings):
    """Points, at most one for each bucket. seconds: what `earl profile` has spent on them."""

    points: tuple[ProfilePoint, ...] = ()
    seconds: float = Field(default=0.0, ge=0)

    def observe(self, point: ProfilePoint, half_life: float) -> ProfileTable:
        """Return the table with one more measurement.

        The bucket's older weight halves every `half_life` iterations. A load that has worked after
        all is no longer forbidden, and the other way round.
        """
        kept = {other.bucket: other for other in self.points}
        old = kept.get(point.bucket)
        if old is not None and old.out_of_memory == point.out_of_memory:
            point = _merged(old, point, half_life)
        kept[point.bucket] = point
        points = tuple(kept[bucket] for bucket in sorted(kept))
        return ProfileTable(points=points, seconds=self.seconds)

    def by_key(self) -> dict[str, list[ProfilePoint]]:
        """Points of each candidate."""
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
"""The roofline's tokens/s of a candidate at (context, requests)."""


def log_ratios(
    points: Iterable[ProfilePoint], guess: Guess
) -> Iterator[tuple[ProfilePoint, float]]:
    """Each point with log(measured / guessed throughput), where there is something to compare."""
    for point in points:
        expected = guess(point.context, point.requests)
        if not point.out_of_memory and point.tokens_per_second > 0 and expected > 0:
            yield point, math.log(point.tokens_per_second / expected)


class Correction:
    """Measured over guessed throughput of one candidate, interpolated between its points.

    Weights fall with the distance in octaves of live tokens and, half as fast, of requests; far
    from every measurement the correction fades to exp(base). base: log of what all candidates of
    the stage have in common (at a load, or everywhere), such as a device that is slower than its
    figures; 0: nothing is known.
    """

    def __init__(
        self, points: Iterable[ProfilePoint], guess: Guess, base: Guess | float = 0.0
    ) -> None:
        self._base = base
        self._points = [
            (math.log2(p.live_tokens), math.log2(p.requests), min(p.weight, 4.0), log_ratio)
            for p, log_ratio in log_ratios(points, guess)
        ]

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
    """log(measured / guessed throughput) that a stage's measured candidates have in common at a
    load: one that was not measured is no faster or slower for that.

    Each counts as much as it was measured there; where none was, all of them alike.
    """

    def __init__(self, measured: Sequence[tuple[Sequence[ProfilePoint], Guess]]) -> None:
        self._found: dict[tuple[float, float], float] = {}
        known = [[ratio for _, ratio in log_ratios(*each)] for each in measured]
        self._everywhere = fmean([fmean(each) for each in known if each] or [0.0])
        self._measured = [Correction(points, guess, self._everywhere) for points, guess in measured]

    def __call__(self, context: float, requests: float) -> float:
        place = context, requests
        if place not in self._found:
            total, summed = _LITTLE, _LITTLE * self._everywhere
            for correction in self._measured:
                factor, share = correction(context, requests)
                total, summed = total + share, summed + share * math.log(factor)
            self._found[place] = summed / total
        return self._found[place]


_LITTLE = 0.05


def fingerprint(*parts: Mapping[str, object]) -> str:
    """16 hexadecimal digits of model, hardware and software versions, whatever their key order."""
    return xxhash.xxh3_64_hexdigest(canonical_json(list(parts)))


def table_path(directory: Path, mark: str) -> Path:
    """Return the path of a fingerprint's table."""
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
    """The table of a fingerprint; empty when nothing was measured. Raises `ProfileError` for a file
    that is damaged or of another fingerprint or format."""
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
                f"the profile {path} is of another format or model: remove it to measure again"
            )
        points = tuple(ProfilePoint(**row) for row in table.to_pylist())
        return ProfileTable(points=points, seconds=float(metadata.get(b"seconds", b"0")))
    except ProfileError:
        raise
    # A ValueError: a whole file whose lines are none that we write.
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise ProfileError(
            f"the profile {path} cannot be read ({_sentence(error)}): remove it to measure again"
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

    metadata = {"format": FORMAT, "mark": mark, "seconds": repr(table.seconds)}
    rows = pa.Table.from_pylist([point.model_dump() for point in table.points])
    written = pa.BufferOutputStream()
    pq.write_table(rows.replace_schema_metadata(metadata), written)
    path = table_path(directory, mark)
    write_atomic(path, written.getvalue().to_pybytes(), mode=0o644)
    return path

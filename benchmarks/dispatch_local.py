"""Dispatch from N producers to N consumers on one host: EARL, and the copy that is its limit.

python -m benchmarks.dispatch_local [--quick] [--workers N] [--json FILE] [--markdown FILE]

The ways of other systems were measured beside it up to commit 5fdea9c, which has their emulation
and made `results/dispatch_local.md`, the last table with them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.dispatch_local_processes import BYTES_PER_TOKEN, COLUMNS, Consumer, Producer, Size
from earl_core.dispatch import Manifest, ShardEntry, ShardStore
from tools.harness import Report, Row, interval, median, parser, publish
from tools.process_group import Group

GIB = 2**30
_COPIES = 1.4
"""Copies of a batch that are in memory at the worst."""
_SPARE_BYTES = 2 * GIB
"""Bytes that no size may take, so that the machine does not begin to swap or to kill."""
SHARED_MEMORY = Path("/dev/shm")
_RELEASE_SECONDS = 30.0


def main() -> None:
    """Run the benchmark."""
    options = _options()
    report = Report(
        "dispatch_local", f"{options.workers} producers to {options.workers} consumers on one host"
    )
    sizes = _sizes(options)
    ours: dict[str, _Measured] = {}
    with earl_groups(options.workers) as (producers, consumers):
        for size in _fitting(sizes, report):
            with Earl(producers, consumers, size) as earl:
                ours[size.name] = _measure(earl, _repetitions(size, options.quick))
            report.rows += _earl_rows(size, ours[size.name])
    report.headline["publish_fetch_over_memcpy"] = max(one.over_memcpy for one in ours.values())
    report.notes += _notes()
    publish(report, options)


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument(
        "--workers",
        type=int,
        default=max(2, min(4, os.cpu_count() or 2)),
        help="producers, and as many consumers",
    )
    found = made.parse_args()
    if 64 % found.workers:
        made.error("64 samples must divide by --workers")
    return found


def _sizes(options: argparse.Namespace) -> list[Size]:
    contexts = (8, 32) if options.quick else (8, 16, 32)
    sizes = [Size(f"64 x {k}K", 64, k * 1024, options.workers) for k in contexts]
    if not options.quick:
        for gib in (1, 4):
            sizes.append(Size.of_bytes(f"{gib} GiB", gib * GIB, 32 * 1024, options.workers))
    return sizes


def _repetitions(size: Size, quick: bool) -> int:
    if size.bytes > 2 * GIB:
        return 5
    if size.bytes > GIB // 2:
        return 9
    return 15 if quick else 41


def _fitting(sizes: list[Size], report: Report) -> Iterator[Size]:
    """The sizes for which there is memory, the others a note."""
    for size in sizes:
        free = psutil.virtual_memory().available
        if _COPIES * size.bytes + _SPARE_BYTES <= free:
            yield size
            gc.collect()
        else:
            report.notes.append(
                f"{size.name}: left out, it takes about {_COPIES * size.bytes / GIB:.1f} GiB "
                f"and {free / GIB:.1f} GiB were free."
            )


@dataclass
class EarlTimes:
    """Seconds of each repetition. total: from the first producer's start to the last copy into the
    training buffers, with the manifest's way through the controller in between."""

    publish: list[float] = field(default_factory=list)
    fetch: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    checksum: list[float] = field(default_factory=list)

    @property
    def moved(self) -> list[float]:
        """Publishing and fetching together."""
        return [sum(each) for each in zip(self.publish, self.fetch, strict=True)]


class Earl:
    """N producers, N consumers and the store between them, for one size. A context manager."""

    def __init__(self, producers: Group, consumers: Group, size: Size) -> None:
        self._producers, self._consumers, self._size = producers, consumers, size
        self._root = Path(tempfile.mkdtemp(prefix="earl-bench-", dir=SHARED_MEMORY))
        max_bytes = 3 * size.bytes + 2**26
        self._store = ShardStore(self._root / "run", max_bytes)
        self._arguments = (size, self._root / "run", max_bytes)

    def __enter__(self) -> Earl:
        self._producers.call("prepare", *self._arguments)
        self._consumers.call("prepare", *self._arguments)
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(RuntimeError):  # the processes may be the reason for ending
            self._producers.call("drop")
            self._consumers.call("drop")
        shutil.rmtree(self._root, ignore_errors=True)

    def copy(self) -> float:
        """Seconds of the limit."""
        return self._producers.call("copy").seconds

    def move(self, times: EarlTimes, verify: bool = False, check: bool = False) -> None:
        """One batch from all producers to all consumers; adds a repetition to `times`."""
        published = self._producers.call("publish", verify)
        manifest = _manifest(published.results)
        fetched = self._consumers.call("fetch", manifest, verify)
        packed = self._consumers.call("pack")
        completed = self._producers.call("complete")
        if check:
            self._consumers.call("check")
        self._consumers.call("close")
        for entry in completed.results:
            self._release(entry)
        times.publish.append(published.seconds)
        times.fetch.append(fetched.seconds)
        times.pack.append(packed.seconds)
        times.total.append(packed.end - published.start)
        times.checksum.append(max(0.0, completed.end - published.end))

    def _release(self, entry: ShardEntry) -> None:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while not self._store.release(entry):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{entry.file} is still leased after its batch was closed")
            time.sleep(0.001)


@contextlib.contextmanager
def earl_groups(workers: int) -> Iterator[tuple[Group, Group]]:
    """Producers and consumers."""
    with Group(Producer, workers) as producers, Group(Consumer, workers) as consumers:
        yield producers, consumers


def _manifest(entries: list[ShardEntry]) -> Manifest:
    return Manifest(
        run="benchmark",
        iteration=0,
        stage="rollout",
        key="benchmark",
        policy_version=0,
        shards=tuple(entries),
    )


@dataclass
class _Measured:
    """EARL and its limit at one size: seconds of each repetition."""

    copy: list[float]
    background: EarlTimes
    verified: EarlTimes
    cold: EarlTimes

    @property
    def limit(self) -> float:
        """Median seconds of copying the batch."""
        return median(self.copy)

    @property
    def over_memcpy(self) -> float:
        """Publishing and fetching over copying, checksums in the background."""
        return median(self.background.moved) / self.limit


def _measure(earl: Earl, repetitions: int) -> _Measured:
    found = _Measured([], EarlTimes(), EarlTimes(), EarlTimes())
    earl.move(found.cold, check=True)
    warm_up = EarlTimes()
    for verify in (False, True):
        earl.move(warm_up, verify, check=True)
    for _ in range(repetitions):
        # In turn, so that what else the machine does meets all of them.
        found.copy.append(earl.copy())
        earl.move(found.background)
        found.copy.append(earl.copy())
        earl.move(found.verified, verify=True)
    return found


def _earl_rows(size: Size, found: _Measured) -> list[Row]:
    copy = _row(size, "memcpy", None, None, found.copy, found.limit)
    rows = [copy]
    for name, times in (
        ("EARL", found.background),
        ("EARL, verify always", found.verified),
        ("EARL, cold pool", found.cold),
    ):
        row = _row(size, name, times.publish, times.fetch, times.moved, found.limit)
        row |= {
            "pack_ms": 1e3 * median(times.pack),
            "all_ms": 1e3 * median(times.total),
            "checksum_ms": 1e3 * median(times.checksum),
        }
        rows.append(row)
    return rows


def _row(
    size: Size,
    way: str,
    publish_s: list[float] | None,
    fetch_s: list[float] | None,
    moved_s: list[float],
    limit: float,
) -> Row:
    return {
        "batch": size.name,
        "mib": round(size.bytes / 2**20, 1),
        "way": way,
        "publish_ms": None if publish_s is None else 1e3 * median(publish_s),
        "fetch_ms": None if fetch_s is None else 1e3 * median(fetch_s),
        "moved_ms": 1e3 * median(moved_s),
        "least to most": interval([1e3 * each for each in moved_s]),
        "over_memcpy": median(moved_s) / limit,
    }


def _notes() -> list[str]:
    return [
        f"{len(COLUMNS)} columns, {BYTES_PER_TOKEN} bytes a token. Producer p of N makes a stretch "
        "of the rows, consumer c needs the rows c, c + N, ...: some of every producer. Every value "
        "that arrived was checked, untimed.",
        "memcpy: N processes copy their share of the batch from warm arrays into memory whose "
        "pages are there; the limit. Each time is from when the first process began to when the "
        "last ended. Medians; EARL and memcpy in turn in the same processes.",
        "EARL: publish_ms is creating the shard, filling it in place from the same warm arrays, "
        "and sealing it; fetch_ms is views of all rows and columns in the consumers, while "
        "checksums are computed in the background; the pool is warm as in a running system. "
        "checksum_ms: from the last seal until all checksums are there. pack_ms: all rows copied "
        "into a training buffer. all_ms: from the first producer's start to the last packed row, "
        "with the manifest's way through the controller.",
        "EARL, verify always: publish_ms includes waiting for the checksum, fetch_ms verifying "
        "each shard by every consumer. EARL, cold pool: the very first batch of a run, which pays "
        "for fresh pages, a mapping and its page tables; once, and not in the headline.",
    ]


if __name__ == "__main__":
    main()

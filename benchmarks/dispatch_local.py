"""From N producers to N consumers on one host: EARL, the copy that is its limit, and other ways.

python -m benchmarks.dispatch_local [--quick] [--workers N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.dispatch_local_batch import BYTES_PER_TOKEN, COLUMNS, Size
from benchmarks.dispatch_local_earl import Earl, EarlTimes, earl_groups
from benchmarks.dispatch_local_peers import Way, gloo_way, tensordict_way
from benchmarks.harness import Report, Row, interval, median, parser, publish

_SPEEDUP = "speedup_vs_single_controller"
_RAY_COPIES = 3.2
GIB = 2**30
_SPARE_BYTES = 2 * GIB
"""That no way may take, so that the machine does not begin to swap or to kill."""


@dataclass(frozen=True)
class Peer:
    """Another way: `open` makes it ready; at its worst `copies` batches are in memory."""

    name: str
    open: Callable[[Size], AbstractContextManager[Way]]
    copies: float
    headline: str | None = None


def main() -> None:
    """Run the benchmark."""
    options = _options()
    report = Report(
        "dispatch_local",
        f"{options.workers} producers to {options.workers} consumers on one host",
    )
    sizes = _sizes(options)
    ours: dict[str, _Measured] = {}
    with earl_groups(options.workers) as (producers, consumers):
        for size in _fitting(sizes, 1.4, "EARL", report):
            with Earl(producers, consumers, size) as earl:
                ours[size.name] = _measure(earl, _repetitions(size, options.quick))
            report.rows += _earl_rows(size, ours[size.name])
    controller = {} if options.earl_only else _measure_peers(report, sizes, ours, options.quick)
    report.headline["publish_fetch_over_memcpy"] = max(one.over_memcpy for one in ours.values())
    for headline, seconds in controller.items():
        report.headline[headline] = min(
            seconds[name] / median(ours[name].background.total)
            for name in seconds
            if name.startswith("64 x")
        )
    order = {size.name: number for number, size in enumerate(sizes)}
    report.rows.sort(key=lambda row: order[str(row["batch"])])
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
    made.add_argument("--earl-only", action="store_true", help="without the other ways")
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


def _fitting(sizes: list[Size], copies: float, way: str, report: Report) -> Iterator[Size]:
    """The sizes for which there is memory, the others a note."""
    for size in sizes:
        free = psutil.virtual_memory().available
        if copies * size.bytes + _SPARE_BYTES <= free:
            yield size
            gc.collect()
        else:
            report.notes.append(
                f"{way}, {size.name}: left out, it takes about {copies * size.bytes / GIB:.1f} GiB "
                f"and {free / GIB:.1f} GiB were free."
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


def _measure_peers(
    report: Report, sizes: list[Size], ours: dict[str, _Measured], quick: bool
) -> dict[str, dict[str, float]]:
    """Add the other ways' rows; median seconds by batch for each headline."""
    controller: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        for peer in _peers(report, sizes, stack):
            for size in _fitting(sizes, peer.copies, peer.name, report):
                seconds = _measure_peer(peer, size, min(15, _repetitions(size, quick)))
                publish_s, fetch_s = (list(each) for each in zip(*seconds, strict=True))
                both = [sum(each) for each in seconds]
                limit = ours[size.name].limit if size.name in ours else None
                report.rows.append(_row(size, peer.name, publish_s, fetch_s, both, limit))
                if peer.headline is not None:
                    controller.setdefault(peer.headline, {})[size.name] = median(both)
    return controller


def _measure_peer(peer: Peer, size: Size, repetitions: int) -> list[tuple[float, float]]:
    with peer.open(size) as way:
        way.move()
        way.check()
        seconds = [way.move() for _ in range(repetitions)]
        way.check()
    return seconds


def _peers(report: Report, sizes: list[Size], stack: contextlib.ExitStack) -> Iterator[Peer]:
    """The other ways that are installed; Ray runs, until the stack ends, when its turn comes."""
    yield Peer("torch gloo, gather and scatter", gloo_way, 3.6)
    for package in ("tensordict", "ray"):
        if importlib.util.find_spec(package) is None:
            report.notes.append(f"{package} is not installed: its ways are left out.")
    if importlib.util.find_spec("tensordict") is not None:
        yield Peer("tensordict memmap", tensordict_way, 2.4)
    if importlib.util.find_spec("ray") is None:
        return
    from benchmarks.dispatch_local_ray import controller_way, object_store_way, ray_cluster

    free = psutil.virtual_memory().available - _SPARE_BYTES
    largest = max((s.bytes for s in sizes if _RAY_COPIES * s.bytes <= free), default=0)
    stack.enter_context(ray_cluster(sizes[0].workers, largest))
    what = "verl" if importlib.util.find_spec("verl") else "as verl"
    numpy_way = partial(controller_way, mode="numpy")
    yield Peer("Ray object store", object_store_way, _RAY_COPIES)
    default_way = partial(controller_way, mode="")
    yield Peer(f"single controller, {what}", default_way, 8.0, _SPEEDUP)
    yield Peer(f"single controller, {what}, numpy", numpy_way, 7.0, f"{_SPEEDUP}_numpy")


def _row(
    size: Size,
    way: str,
    publish_s: list[float] | None,
    fetch_s: list[float] | None,
    moved_s: list[float],
    limit: float | None,
) -> Row:
    return {
        "batch": size.name,
        "mib": round(size.bytes / 2**20, 1),
        "way": way,
        "publish_ms": None if publish_s is None else 1e3 * median(publish_s),
        "fetch_ms": None if fetch_s is None else 1e3 * median(fetch_s),
        "moved_ms": 1e3 * median(moved_s),
        "least to most": interval([1e3 * each for each in moved_s]),
        "over_memcpy": None if limit is None else median(moved_s) / limit,
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
        "The single controller: publish_ms until the driver has the whole batch, fetch_ms until "
        "the consumers have theirs; actor calls of Ray, as verl's DataProto is moved, in its "
        "default and in its numpy serialisation (an environment variable). "
        "speedup_vs_single_controller compares the default with all_ms, the headline with _numpy "
        "the other, although they have not packed anything; the worst of the batches of 64 "
        "samples.",
        "gloo: the N ranks are producers and consumers both. tensordict writes new files for "
        "every batch.",
    ]


if __name__ == "__main__":
    main()

"""A batch on its way between hosts: gathered and scattered by one controller, or fetched directly.

Hosts are network namespaces with links of limited rate, so the sockets are real ones; the links,
not this machine's few cores, have to be the limit. Both ways use the same transport, with the same
bounds on requests in flight, and every row that arrives is compared with what was written.

    sudo .venv/bin/python -m benchmarks.dispatch_hosts --json out.json
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.dispatch_hosts_node import LIMITS, TOKEN_BYTES, Received, Server, Worker
from earl_core.dispatch import Manifest, ShardEntry
from tools.harness import Report, Row, median, parser, publish
from tools.namespaces import Link, Network, missing, network
from tools.process_group import Group
from tools.traffic import predict

ASSIGNMENTS = (
    "no locality",
    "random reshuffle",
    "half local",
    "three quarters local",
    "host-first",
)
_OF_ANY = ("random reshuffle", "host-first")
"""Assignments of rows that differ, or do not divide among the hosts."""
_LEAD_SECONDS = 0.05
_CONTROLLER_REPEAT = 2


@dataclass
class Cell:
    """Repetitions of one assignment at one size."""

    ours: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    busiest: list[int] = field(default_factory=list)
    needed: int = 0


def main() -> None:
    """Measure, and print the table."""
    options = _options()
    why = missing()
    if why is not None:
        print(f"Nothing was measured: {why}.")
        return
    report = Report("dispatch_hosts", "A batch between hosts: one controller against direct fetch")
    link = Link(options.rate, queue_bytes=options.queue * 1024)
    dropped = 0
    for hosts in options.hosts:
        with network(hosts, link) as made, _workers(made) as workers:
            for tokens in options.tokens:
                report.rows += _size(
                    made, workers, _Rows.of(options, hosts, tokens), options.repeat
                )
            dropped += made.dropped()
    _conclude(report, options, dropped)
    publish(report, options)


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--rate", type=float, default=25.0, help="Mbit/s of every link")
    made.add_argument("--queue", type=int, default=1024, help="KiB that wait at a link at most")
    made.add_argument("--repeat", type=int, default=7, help="measurements of every cell")
    made.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16])
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    made.add_argument("--rows", type=int, default=64, help="of the batch")
    made.add_argument("--uneven", action="store_true", help="rows of an eighth of --tokens to all")
    made.add_argument("--one-producer", action="store_true", help="one host has made all rows")
    options = made.parse_args()
    if options.quick:
        options.hosts, options.tokens, options.repeat = [4, 16], [8192], 3
    if min(options.hosts) < 2 or options.rows < 1:
        made.error("a batch of one row or more goes between two hosts or more")
    return options


@dataclass(frozen=True)
class _Rows:
    """A batch: tokens of every row, and the host where it is made. longest: of its rows."""

    longest: int
    lengths: list[int]
    home: list[int]
    assignments: tuple[str, ...]

    @classmethod
    def of(cls, options: argparse.Namespace, hosts: int, tokens: int) -> _Rows:
        """Rows of equal lengths evenly over the hosts, or as the options say."""
        count = options.rows
        draw = random.Random(tokens)
        lengths = [tokens] * count
        if options.uneven:
            lengths = [draw.randint(tokens // 8, tokens) for _ in range(count)]
        home = (
            [0] * count if options.one_producer else [row * hosts // count for row in range(count)]
        )
        alike = not (count % hosts or options.uneven or options.one_producer)
        return cls(tokens, lengths, home, ASSIGNMENTS if alike else _OF_ANY)


@contextmanager
def _workers(made: Network) -> Iterator[Group]:
    """Start a server and a worker on every host; end them and remove their shards afterwards."""
    directory = Path(f"/dev/shm/earl-benchmark-{os.getpid()}")
    try:
        with (
            Group(Server, made.hosts, made, directory, fork=True),
            Group(Worker, made.hosts, made, directory, fork=True) as workers,
        ):
            yield workers
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _size(network: Network, workers: Group, batch: _Rows, repeat: int) -> list[Row]:
    """All assignments of a batch."""
    hosts, home = network.hosts, batch.home
    rows = [[row for row, own in enumerate(home) if own == host] for host in range(hosts)]
    made = workers.each("produce", {n: (own, batch.lengths) for n, own in enumerate(rows)}).results
    entries: list[ShardEntry] = [entry for entry in made if entry is not None]
    manifest = Manifest(
        run="r", iteration=0, stage="rollout", key="k", policy_version=0, shards=tuple(entries)
    ).sealed()
    central: list[float] = []
    cells = {name: Cell() for name in batch.assignments}
    # The first round faults pages and opens connections; it does not count.
    for number in range(repeat + 1):
        draw = random.Random(1000 * batch.longest + number)
        workers.call("prepare", manifest, owners("random reshuffle", home, hosts, draw))
        if not number:
            workers.call("greet")
        # The one way that takes long is also the one whose times hardly differ.
        if number <= _CONTROLLER_REPEAT:
            seconds = _gather_and_scatter(workers, len(home))
            central += [seconds] if number else []
        for name, cell in cells.items():
            owner = owners(name, home, hosts, draw)
            moved, needed, busiest = workers.call("prepare", manifest, owner).results[0]
            seconds = _fetch_directly(workers, len(home))
            if number:
                cell.ours.append(seconds)
                cell.moved.append(moved)
                cell.busiest.append(busiest)
                cell.needed = needed
    return [_row(network, batch, name, central, cell) for name, cell in cells.items()]


def owners(name: str, home: Sequence[int], hosts: int, draw: random.Random) -> list[int] | None:
    """The host that each row goes to, equally many to each; None for the plan's own choice."""
    if name == "host-first":
        return None
    owner = list(home)
    share = len(home) // hosts
    kept = {"no locality": 0, "half local": share // 2, "three quarters local": 3 * share // 4}
    if name == "random reshuffle":
        owner = [row * hosts // len(home) for row in range(len(home))]
        draw.shuffle(owner)
        return owner
    moved = [
        row
        for host in range(hosts)
        for row in draw.sample(range(host * share, (host + 1) * share), share - kept[name])
    ]
    places = [home[row] for row in moved]
    draw.shuffle(places)
    # Rows that would stay are exchanged with ones for which neither stays.
    for index, row in enumerate(moved):
        while places[index] == home[row]:
            other = draw.randrange(len(moved))
            if home[moved[other]] != places[index] and places[other] != home[row]:
                places[index], places[other] = places[other], places[index]
    for row, place in zip(moved, places, strict=True):
        owner[row] = place
    return owner


def _fetch_directly(workers: Group, rows: int) -> float:
    start = time.monotonic() + _LEAD_SECONDS
    seconds = max(workers.call("fetch", start).results) - start
    _check(workers.call("check_fetched").results, rows)
    return seconds


def _gather_and_scatter(workers: Group, rows: int) -> float:
    start = time.monotonic() + _LEAD_SECONDS
    [entries] = workers.each("gather", {0: (start,)}).results
    shares = {host: (entry,) for host, entry in enumerate(entries)}
    seconds = max(workers.each("scatter", shares).results) - start
    _check(workers.each("check_scattered", shares).results, rows)
    workers.each("tidy", {0: ()})
    return seconds


def _check(results: Sequence[Received], rows: int) -> None:
    if not all(one.right for one in results) or sum(one.rows for one in results) != rows:
        raise RuntimeError("rows arrived wrong or not at all: the transport is broken")


def _row(made: Network, batch: _Rows, name: str, central: list[float], cell: Cell) -> Row:
    hosts, link = made.hosts, made.link
    per_host = cell.needed / hosts
    local = 1 - median(cell.moved) / cell.needed
    mean_moved = median(cell.moved) / hosts
    uneven = median(cell.busiest) / mean_moved - 1 if mean_moved else 0.0
    bits = link.megabits_per_second * 1e6
    expected_central = predict(hosts, per_host, bits, 0.0, 1.0, 1.0, 0.0, "single_controller")
    expected = predict(hosts, per_host, bits, local, 1.0, 1.0, uneven, "direct")
    ours, theirs = median(cell.ours), median(central)
    return {
        "hosts": hosts,
        "tokens": batch.longest,
        "MB": round(sum(batch.lengths) * TOKEN_BYTES / 1e6, 1),
        "assignment": name,
        "local %": round(100 * local),
        "controller s": theirs,
        "direct s": ours,
        "speedup": theirs / ours,
        "predicted": expected_central / expected,
        "predicted direct s": expected,
        "worst / median": max(cell.ours) / ours,
        "controller worst / median": max(central) / theirs,
    }


def _conclude(report: Report, options: argparse.Namespace, dropped: int) -> None:
    for hosts in options.hosts if len(options.hosts) == 1 else [16]:
        for name, headline in (("random reshuffle", "shuffle"), ("host-first", "host_first")):
            found = [
                float(row["speedup"] or 0)
                for row in report.rows
                if row["hosts"] == hosts and row["assignment"] == name
            ]
            if found:
                report.headline[f"hosts{hosts}_{headline}_speedup_min"] = min(found)
    late = sum(float(row["worst / median"] or 0) > 2 for row in report.rows)
    lengths = "an eighth of these tokens to all" if options.uneven else "equal length"
    maker = ", all made by one host," if options.one_producer else ""
    report.notes += [
        f"{options.rows} rows of {lengths}{maker} in 5 columns, "
        f"{TOKEN_BYTES} bytes per token; links of "
        f"{options.rate:g} Mbit/s in both directions with queues of {options.queue} KiB; TCP with "
        f"the system's congestion control; {dropped:,} packets dropped by full queues in all.",
        "controller: one host receives every row straight into the shard that it then serves to "
        "the row's consumer; barrier; consumers fetch their shards. No serialisation and no "
        "copies are charged to it. direct: consumers fetch their rows from the producers.",
        "Seconds from a common start to the last host's last row, medians over "
        f"{options.repeat} repetitions ({min(options.repeat, _CONTROLLER_REPEAT)} of the "
        "controller's way), each with another assignment; one before them does not count. Plans "
        "were made before, by every host. Every row of every repetition was compared with what "
        "its producer wrote.",
        f"Both ways ask for {LIMITS.request_bytes // 1024} KiB at a time and have "
        f"{LIMITS.bytes_in_flight // 1024} KiB in flight at most per receiver.",
        f"{late} of {len(report.rows)} cells have a direct run beyond twice their median.",
        "predicted: the ratio and the seconds that tools/traffic.py gives. After a "
        f"pause a link sends {Link.burst_bytes // 1024} KiB at once, which the model leaves out.",
    ]


if __name__ == "__main__":
    main()

"""Host-to-device copies of a shard: pageable, registered in place, and through pinned staging.

Each way moves the same bytes of a sealed segment in shared memory to the GPU:

- `pageable`: straight from the mapping, as the driver finds it;
- `staged`: copied into a pinned buffer, then asynchronously on a side stream (what the update
  stage's feed does while it packs);
- `registered`: the read-only mapping is page-locked once, as readers of published weights do it,
  then copied asynchronously on a side stream without a copy on the host;
- `link`: from one pinned buffer to the GPU, the most that is possible; nothing reaches the buffer.

Then each is overlapped with matrix products, the way microbatches follow each other: `overlap` is
the share of the shorter of the two that is hidden behind the longer, 1 where all of it is. Needs a
CUDA device; says so and exits with status 0 where there is none. Run it as
`python -m benchmarks.gpu.dispatch_pinned` from the repository's root.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.update_mfu import timed as times_of
from earl_core.dispatch.segments.pool import SegmentPool
from tools.harness import Report, Row, parser, publish, shown
from tools.sealed_segment import LOCATIONS, Shard

TITLE = "Host-to-device copies of a shard in shared memory"


@dataclass
class Way:
    """One way of copying: `start` begins the copy, which is over when `stream` is idle."""

    name: str
    start: Callable[[], None]
    stream: torch.cuda.Stream
    once: float | None = None


def ways(shard: Shard, device: torch.device, once: float | None) -> list[Way]:
    """The ways of ordinary memory, or that of a shard page-locked in `once` seconds."""
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    source = shard.tensor
    there = torch.empty(source.numel(), dtype=torch.uint8, device=device)
    pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)

    def pageable() -> None:
        there.copy_(source)

    def staged() -> None:
        # The copy before this one may still read the buffer.
        side.synchronize()
        pinned.copy_(source)
        with torch.cuda.stream(side):
            there.copy_(pinned, non_blocking=True)

    def registered() -> None:
        # torch asks the driver whether memory is pinned, and the driver knows the registration.
        with torch.cuda.stream(side):
            there.copy_(source, non_blocking=True)

    def link() -> None:
        with torch.cuda.stream(side):
            there.copy_(pinned, non_blocking=True)

    if once is not None:
        return [Way("registered", registered, side, once)]
    return [Way("pageable", pageable, main), Way("staged", staged, side), Way("link", link, side)]


def timed(work: Callable[[], None], repetitions: int) -> float:
    """Median seconds until the device is idle again."""
    return statistics.median(times_of(work, repetitions + 2)[2:])


@dataclass
class Compute:
    """Matrix products that keep the device busy for about the seconds asked for."""

    device: torch.device
    rounds: int = 1
    _factor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._factor = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)

    def run(self) -> None:
        for _ in range(self.rounds):
            self._factor @ self._factor

    def fit(self, seconds: float) -> None:
        self.rounds = 8
        self.rounds = max(1, round(8 * seconds / timed(self.run, 5)))


def measure(shard: Shard, device: torch.device, repetitions: int) -> list[Row]:
    # Pageable is measured before the mapping is page-locked, which ends with the mapping.
    rows = [row_of(way, shard, device, repetitions) for way in ways(shard, device, None)]
    try:
        once = shard.page_lock()
    except RuntimeError as error:
        rows.append({"way": "registered", "MiB": len(shard.tensor) >> 20, "note": str(error)})
        return rows
    return [*rows, *(row_of(way, shard, device, repetitions) for way in ways(shard, device, once))]


def row_of(way: Way, shard: Shard, device: torch.device, repetitions: int) -> Row:
    copy = timed(way.start, repetitions)
    compute = Compute(device)
    compute.fit(copy)
    alone = timed(compute.run, repetitions)

    def both() -> None:
        # The products are queued first, as the current microbatch's are when the next one goes.
        compute.run()
        way.start()

    together = timed(both, repetitions)
    hidden = (copy + alone - together) / min(copy, alone)
    size = shard.tensor.nbytes
    row: Row = {
        "way": way.name,
        "MiB": size >> 20,
        "copy ms": copy * 1e3,
        "GB/s": size / copy / 1e9,
        "compute ms": alone * 1e3,
        "together ms": together * 1e3,
        "overlap": min(1.0, max(0.0, hidden)),
        "once ms": None if way.once is None else way.once * 1e3,
    }
    print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
    return row


def headline(rows: list[Row]) -> dict[str, float]:
    """The worst size's ratios."""
    rates = {(row["way"], row["MiB"]): row.get("GB/s") for row in rows}

    def ratio(name: str, base: str) -> float | None:
        found = [
            float(rate) / float(rates[base, size])  # type: ignore[arg-type]
            for (way, size), rate in rates.items()
            if way == name and rate is not None
        ]
        return min(found, default=None)

    quoted = {
        f"{way}_over_{base}": ratio(way, base)
        for way in ("registered", "staged")
        for base in ("pageable", "link")
    }
    for way in ("registered", "staged"):
        shares = [float(row["overlap"]) for row in rows if row["way"] == way and "overlap" in row]  # type: ignore[arg-type]
        quoted[f"{way}_overlap"] = min(shares, default=None)
    return {name: value for name, value in quoted.items() if value is not None}


def main() -> None:
    given = parser(__doc__ or "", smoke=True).parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here: nothing was measured.")
        return
    # Nothing writes through the tensors over the read-only mapping.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    device = torch.device("cuda")
    sizes = [64] if given.quick or given.smoke else [16, 64, 256, 1024]
    repetitions = 5 if given.quick or given.smoke else 20
    rows: list[Row] = []
    place = next(path for path in LOCATIONS if path.is_dir())
    with tempfile.TemporaryDirectory(dir=place, prefix="earl-benchmark-") as directory:
        pool = SegmentPool(Path(directory), 4 * 2**30)
        for size in sizes:
            shard = Shard(pool, size << 20)
            try:
                rows += measure(shard, device, repetitions)
            finally:
                shard.close()
    notes = [
        f"On {torch.cuda.get_device_name(device)}; medians of {repetitions} repetitions.",
        "`once ms` is the registration, paid once per process and segment; `staged` includes the "
        "copy into the pinned buffer, which packing needs in any case.",
    ]
    publish(Report("dispatch_pinned", TITLE, rows, headline(rows), notes), given)


if __name__ == "__main__":
    main()

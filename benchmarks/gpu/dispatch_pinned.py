"""Host-to-device copies of a shard: pageable, registered in place, and through pinned staging.

Each way moves the same bytes of a sealed segment in shared memory to the GPU:

- `pageable`: straight from the mapping, as the driver finds it;
- `staged`: copied into a pinned buffer, then asynchronously on a side stream (what the update
  stage's feed does while it packs);
- `registered`: the read-only mapping is registered once (cudaHostRegister, flag 0x08), then copied
  asynchronously on a side stream without a copy on the host.

Then each is overlapped with matrix products, the way microbatches follow each other: `overlap` is
the share of the shorter of the two that is hidden behind the longer, 1 where all of it is. Needs a
CUDA device; says so and exits with status 0 where there is none. Run it as
`python -m benchmarks.gpu.dispatch_pinned` from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from earl_core.dispatch.segments.leases import map_shared
from earl_core.dispatch.segments.pool import SegmentPool

READ_ONLY = 0x08  # cudaHostRegisterReadOnly
LOCATIONS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
TITLE = "Host-to-device copies of a shard in shared memory"
Row = dict[str, str | int | float | None]


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="64 MiB only, few repetitions")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    return made.parse_args()


class Shard:
    """A sealed segment of `size` bytes, mapped read-only as readers have it."""

    def __init__(self, pool: SegmentPool, size: int) -> None:
        segment = pool.acquire(size)
        numbers = np.random.default_rng(0).integers(0, 2**31, size // 8, dtype=np.int64)
        np.frombuffer(segment.memory, dtype=np.int64, count=size // 8)[:] = numbers
        whole = segment.size
        self._pool, self._path = (
            pool,
            segment.seal(f"000000-benchmark-0-{segment.generation}.arrow"),
        )
        self._mapped = map_shared(self._path, whole)
        self.array: np.ndarray | None = np.frombuffer(self._mapped.memory, np.uint8, count=size)

    @property
    def tensor(self) -> torch.Tensor:
        assert self.array is not None
        return torch.from_numpy(self.array)

    def close(self) -> None:
        self.array = None
        self._mapped.close()
        self._pool.release(self._path)


class Registration:
    """The mapping registered with the driver, as once per process; `seconds` it took."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.data_ptr()
        began = time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(self._address, tensor.nbytes, READ_ONLY))
        self.seconds = time.perf_counter() - began
        if code != 0:
            raise RuntimeError(
                f"cudaHostRegister of a read-only mapping failed with code {code}: this driver or "
                "device cannot register read-only memory"
            )

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)


@dataclass
class Way:
    """One way of copying: `start` begins the copy, which is over when `stream` is idle."""

    name: str
    start: Callable[[], None]
    stream: torch.cuda.Stream
    once: float | None = None


def ways(shard: Shard, device: torch.device, registration: Registration | None) -> list[Way]:
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

    found = [Way("pageable", pageable, main), Way("staged", staged, side)]
    if registration is not None:
        found.append(Way("registered", registered, side, registration.seconds))
    return found


def timed(work: Callable[[], None], repetitions: int) -> float:
    """Median seconds until the device is idle again."""
    seconds = []
    for repetition in range(repetitions + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repetition >= 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


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
    # Pageable is measured before the registration, which would make it registered.
    rows = [row_of(way, shard, device, repetitions) for way in ways(shard, device, None)]
    try:
        registration = Registration(shard.tensor)
    except RuntimeError as error:
        rows.append({"way": "registered", "MiB": len(shard.tensor) >> 20, "note": str(error)})
        return rows
    try:
        way = ways(shard, device, registration)[-1]
        rows.append(row_of(way, shard, device, repetitions))
    finally:
        registration.close()
    return rows


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
    return {
        "way": way.name,
        "MiB": size >> 20,
        "copy ms": copy * 1e3,
        "GB/s": size / copy / 1e9,
        "compute ms": alone * 1e3,
        "together ms": together * 1e3,
        "overlap": min(1.0, max(0.0, hidden)),
        "once ms": None if way.once is None else way.once * 1e3,
    }


def headline(rows: list[Row]) -> dict[str, float]:
    """The worst size's ratios."""

    def ratio(name: str) -> float | None:
        rates = {(row["way"], row["MiB"]): row.get("GB/s") for row in rows}
        found = [
            float(rate) / float(rates["pageable", size])  # type: ignore[arg-type]
            for (way, size), rate in rates.items()
            if way == name and rate is not None
        ]
        return min(found, default=None)

    quoted = {f"{way}_over_pageable": ratio(way) for way in ("registered", "staged")}
    for way in ("registered", "staged"):
        shares = [float(row["overlap"]) for row in rows if row["way"] == way and "overlap" in row]  # type: ignore[arg-type]
        quoted[f"{way}_overlap"] = min(shares, default=None)
    return {name: value for name, value in quoted.items() if value is not None}


def publish(rows: list[Row], given: argparse.Namespace, notes: list[str]) -> None:
    """Through the benchmarks' shared report where its packages are there, else plainly."""
    numbers = headline(rows)
    with suppress(ImportError):
        from benchmarks.harness import Report
        from benchmarks.harness import publish as shared

        shared(Report("dispatch_pinned", TITLE, rows, numbers, notes), given)
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = (_shown(row.get(column)) for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    quoted = [f"**{name}: {_shown(value)}**  " for name, value in numbers.items()]
    text = "\n".join([f"# {TITLE}", "", *quoted, "", *lines, "", *(f"- {note}" for note in notes)])
    print(text)
    if given.markdown:
        given.markdown.parent.mkdir(parents=True, exist_ok=True)
        given.markdown.write_text(text + "\n", encoding="utf-8")
    if given.json:
        machine: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
        content = {"machine": machine, "command": " ".join(sys.argv), "rows": rows}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({**content, "headline": numbers, "notes": notes}, indent=1) + "\n"
        )


def _shown(value: str | int | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    given = options()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here: nothing was measured.")
        return
    # Nothing writes through the tensors over the read-only mapping.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    device = torch.device("cuda")
    sizes = [64] if given.quick else [16, 64, 256, 1024]
    repetitions = 5 if given.quick else 20
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
    publish(rows, given, notes)


if __name__ == "__main__":
    main()

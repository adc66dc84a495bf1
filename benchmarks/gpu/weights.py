"""Weights out of one GPU into shared memory and into another model's tensors, and parked.

Float32 weights in a 7 B model's shapes are published as bfloat16 and loaded, several versions in a
row, by the functions that a run's learner and its torch engine call:

- `publish`: cast on the GPU, copy into the page-locked segment, digest beside it, seal;
- `load`: open the publication through its page-locked mapping, copy into the model's tensors;
- `park`, `take`: what a learner does that shares its GPU: its tensors' memory given to the host,
  and taken again.

`link` is one large copy from and to page-locked memory, the most that is possible. The first two
versions page-lock two segments, which later ones use again; they have rows of their own. Every
loaded tensor is compared with its source. Both GPUs are one here, so a rate is that of one
direction at a time.

Run it as `python -m benchmarks.gpu.weights` from the repository's root; with `--device cpu --gib
0.2` it shows that it works. It ends within ten minutes.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.learner.memory import Parking
from earl_core.tensors.device_copies import host_memory, queued, upload
from earl_core.weights.load import match, open_weights
from earl_core.weights.publish import publish as publish_weights
from tools.harness import Report, Row, parser, publish, shown

TITLE = "Weights between a GPU and shared memory"
SHARED = Path("/dev/shm")
HIDDEN, INNER, KEYS = 3584, 18944, 512
FIRST = 2
"""Versions whose segments are new."""


def random_weights(size: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Float32 weights of a model whose bfloat16 copy has about `size` bytes: whole layers as a 7 B
    model has them, or narrower ones, and an embedding of a ninth of it."""
    width = HIDDEN
    while width > 64 and _layer_bytes(width) > size / 4:
        width //= 2
    inner, keys = width * INNER // HIDDEN, width * KEYS // HIDDEN
    layer = {
        "q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width),
        "gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm": (width,),
    }  # fmt: skip
    made = {"embedding": torch.randn(int(size / 9) // 2 // width, width, device=device)}
    for number in range(max(1, int(size * 8 / 9 / _layer_bytes(width)))):
        for name, shape in layer.items():
            made[f"layers.{number}.{name}"] = torch.randn(shape, device=device)
    return made


def _layer_bytes(width: int) -> float:
    inner, keys = width * INNER // HIDDEN, width * KEYS // HIDDEN
    return 2.0 * width * (2 * width + 2 * keys + 3 * inner + 1)


class Measurement:
    """Times steps until the device is idle, and prints each row as it is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rows: list[Row] = []

    def seconds(self, action: Callable[[], object]) -> float:
        queued(self._device)()
        began = time.perf_counter()
        action()
        queued(self._device)()
        return time.perf_counter() - began

    def add(self, step: str, size: int, seconds: list[float]) -> float:
        """The median rate in GB/s."""
        rate = size / statistics.median(seconds) / 1e9
        row: Row = {
            "step": step,
            "GB": size / 1e9,
            "s": statistics.median(seconds),
            "from s": min(seconds),
            "to s": max(seconds),
            "GB/s": rate,
            "rounds": len(seconds),
        }
        self.rows.append(row)
        print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
        return rate


def link(measured: Measurement, device: torch.device, size: int, rounds: int) -> None:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = host_memory(size, device).fill_(1)
    for step, target, source in (("link in", there, here), ("link out", here, there)):
        target.copy_(source)
        copies = [
            measured.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
            for _ in range(rounds)
        ]
        measured.add(step, size, copies)


def versions(
    measured: Measurement,
    weights: dict[str, torch.Tensor],
    engine: dict[str, torch.Tensor],
    directory: Path,
    rounds: int,
) -> dict[str, float]:
    """Publish and load so many versions; the rates and the seconds of both together."""
    pool = SegmentPool(directory, sys.maxsize)
    out: list[float] = []
    into: list[float] = []
    last: Path | None = None
    for version in range(FIRST + rounds):
        for tensor in weights.values():
            tensor.mul_(1.01)
        made = []
        out.append(
            measured.seconds(
                lambda: made.append(publish_weights(weights, directory, version, "bfloat16"))  # noqa: B023
            )
        )
        (manifest,) = made
        into.append(
            measured.seconds(
                lambda: upload(match(engine, open_weights(manifest, verify_digest=True)))  # noqa: B023
            )
        )
        for name, tensor in engine.items():
            assert torch.equal(tensor, weights[name].to(torch.bfloat16)), name
        print(f"version {version}: out {out[-1]:.3f} s, in {into[-1]:.3f} s", flush=True)
        if last is not None:
            assert pool.release(last)
        last = Path(manifest.files[0].path)
    size = manifest.bytes
    measured.add("publish, new segments", size, out[:FIRST])
    measured.add("load, new segments", size, into[:FIRST])
    both = [a + b for a, b in zip(out[FIRST:], into[FIRST:], strict=True)]
    rates = {
        "weights_out_gb_per_s": measured.add("publish", size, out[FIRST:]),
        "weights_in_gb_per_s": measured.add("load", size, into[FIRST:]),
    }
    measured.add("publish and load", size, both)
    return {**rates, "publish_and_load_s": statistics.median(both)}


def parking(
    measured: Measurement, engine: dict[str, torch.Tensor], device: torch.device, rounds: int
) -> dict[str, float]:
    parked = Parking(device.type)
    size = sum(tensor.nbytes for tensor in engine.values())
    expected = {name: tensor.flatten()[:64].clone() for name, tensor in engine.items()}
    give, take = [], []
    for _ in range(1 + rounds):
        give.append(measured.seconds(lambda: parked.give(engine.values())))
        take.append(measured.seconds(parked.take))
    for name, tensor in engine.items():
        assert torch.equal(tensor.flatten()[:64], expected[name]), name
    measured.add("park, new host memory", size, give[:1])
    return {
        "park_gb_per_s": measured.add("park", size, give[1:]),
        "take_gb_per_s": measured.add("take", size, take[1:]),
    }


def bytes_that_fit(asked: float, device: torch.device, notes: list[str]) -> float:
    """Return the bytes of a publication that fit: three of them on the device, and two, with some
    air, in shared memory."""
    limits = {f"shared memory ({SHARED})": shutil.disk_usage(SHARED).free / 2.2}
    if device.type == "cuda":
        limits["the GPU's memory"] = torch.cuda.mem_get_info(device)[0] / 3.3
    name, least = min(limits.items(), key=lambda each: each[1])
    if least >= asked:
        return asked
    notes.append(f"{asked / 1e9:.1f} GB were asked for, {least / 1e9:.1f} fit into {name}.")
    print(notes[-1], flush=True)
    return least


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    made = parser(__doc__ or "", smoke=True)
    made.add_argument("--device", default="cuda", help="cuda, or cpu to see that it works")
    made.add_argument("--gib", type=float, default=14.0, help="GiB of the publication")
    made.add_argument("--rounds", type=int, default=10, help="versions after the first two")
    given = made.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here: nothing was measured.")
        return
    rounds = 3 if given.quick or given.smoke else given.rounds
    notes = [
        "Medians. publish: cast from float32 on the GPU, copy, digest, seal. load: look at the "
        "names and the seal, copy. Parked are the bfloat16 tensors."
    ]
    size = bytes_that_fit(given.gib * 2**30, device, notes)
    measured = Measurement(device)
    directory = Path(tempfile.mkdtemp(prefix="earl-benchmark-", dir=SHARED))
    try:
        link(measured, device, min(2**30, int(size)), rounds)
        weights = random_weights(size, device)
        engine = {
            name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()
        }
        headline = versions(measured, weights, engine, directory, rounds)
        weights.clear()
        gc.collect()
        headline |= parking(measured, engine, device, rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    publish(Report("weights", TITLE, measured.rows, headline, notes), given)


if __name__ == "__main__":
    main()

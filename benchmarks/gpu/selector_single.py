"""The selector on one GPU: token budgets, checkpointing and sequences in flight, to 128K tokens.

A random model in the shape of a known one. Update: each token budget with logits as they are, by
chunks, and with checkpointing too, each update by `PolicyLearner` as in a run. Rollout: the torch
engine decodes several sequences at once; what they hold is taken as read, so that only decoding is
measured. Sets A and B are taken in turns. Then runs whose contexts grow are replayed, judged on set
B: which fixed choices run out of memory and where, and what `live_tokens` does with set A as its
profile. Beside each measured peak stands what the memory formula says.

The time is divided among the contexts, so that a slower GPU makes fewer repetitions; the shortest
and the longest context come first, and what no time is left for is not measured. `--raw`,
`--json` and `--markdown` are written after each context.

Run it as `python -m benchmarks.gpu.selector_single` from the repository's root; `--smoke` runs a
tiny model, also without a GPU, to show that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.selector_story import replay
from benchmarks.gpu.update_mfu import free, synchronize
from benchmarks.selector_live_table import (
    Cell,
    LiveTable,
    from_a,
    from_b,
    in_turns,
    together,
    update_cells,
)
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.reshard import reshard
from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.selector.model.candidates import fallbacks, memory_model
from earl_core.selector.model.devices import is_known
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.sizes import logits_chunk
from earl_core.system.memory import is_out_of_memory
from earl_core.tensors.device_speed import measure as measure_device
from tools.harness import Report, Row, parser, publish, shown
from tools.shapes import SHAPES, Shape, random_sample, save_random_model

TITLE = "The selector on one GPU, as contexts grow"
ENGINE = StageDeployment("rollout")

PRETENDED = Hardware(
    cpu_cores=8, memory_bytes=64 * 2**30, gpus=1, gpu_memory_bytes=80 * 2**30, gpu_name="H100-80GB"
)
"""Hardware that the smoke test replays on where there is no GPU."""


def options() -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__ or "", smoke=True)
    names = ", ".join(SHAPES)
    made.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help=f"of {names}")
    made.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS", help="ascending")
    made.add_argument("--budgets", nargs="+", type=int, metavar="TOKENS", help="of a microbatch")
    made.add_argument("--sequences", nargs="+", type=int, metavar="N", help="in flight")
    made.add_argument("--step-tokens", type=int, metavar="TOKENS", help="of an update measured")
    made.add_argument("--repetitions", type=int, help="of each set; 5 (quick: 1) if not given")
    made.add_argument(
        "--seconds", type=float, default=480.0, help="begin no further context or repetition then"
    )
    made.add_argument("--raw", type=Path, metavar="FILE", help="write every repetition as JSON")
    made.add_argument("--generated", type=int, default=32, help="tokens decoded at a time")
    given = made.parse_args()
    sizes = {
        "contexts": [4096, 16384, 32768, 65536, 131072],
        "budgets": [16384, 65536, 131072],
        "sequences": [4, 16, 64],
        "step_tokens": 131072,
        "repetitions": 5,
    }
    if given.quick:
        sizes |= {"contexts": [4096, 32768, 131072], "budgets": [16384, 131072], "repetitions": 1}
    if given.smoke:
        given.model = "tiny"
        sizes |= {"contexts": [64, 256], "budgets": [64, 256], "sequences": [2, 4]}
        sizes |= {"step_tokens": 256, "repetitions": 1}
        given.generated = 4
    for name, value in sizes.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def hardware() -> Hardware:
    """The first GPU, as the selector knows it."""
    if not torch.cuda.is_available():
        return PRETENDED
    found = torch.cuda.get_device_properties(0)
    known = PRETENDED.model_copy(
        update={"gpu_memory_bytes": found.total_memory, "gpu_name": found.name}
    )
    if is_known(known):
        return known
    return known.model_copy(update={"figures": measure_device(torch.device("cuda"))})


def model_shape(shape: Shape, positions: int) -> ModelShape:
    """The shape as the selector knows it."""
    return ModelShape.from_config(shape.config(positions).to_dict())


def now() -> float:
    """Seconds, with the device idle."""
    synchronize()
    return time.perf_counter()


def attempt(work: Callable[[], float]) -> tuple[float, float] | None:
    """A rate and the device's peak; None when the memory ran out."""
    free()
    try:
        rate = work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return rate, float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


class Update:
    """One learner that is laid out anew for each measurement."""

    def __init__(self, directory: Path, given: argparse.Namespace, vocabulary: int) -> None:
        self._settings = UpdateConfig(precision="bf16", learning_rate=1e-8)
        self._directory, self._given, self._vocabulary = directory, given, vocabulary
        self._learner: PolicyLearner | None = None

    def cells(self, context: int, until: float) -> list[Cell]:
        """Every budget at every step of the memory fallback, where chunks of logits may help and
        where they would not; those that cut the samples alike are measured once."""
        count = max(1, self._given.step_tokens // context)
        chunk, mesh = logits_chunk(self._vocabulary, gpu=True), StageDeployment("update")
        layouts = dict.fromkeys(
            step
            for budget in self._given.budgets
            for size in (0, chunk)
            for step in fallbacks(mesh._replace(max_tokens_per_microbatch=budget), size)
            if not step.offload_optimizer
        )
        return update_cells(
            layouts,
            context,
            count,
            lambda layout: attempt(lambda: self._rate(layout, context, count)),
            self._given.repetitions,
            until,
        )

    def _rate(self, layout: StageDeployment, context: int, count: int) -> float:
        """Tokens/s of one update, after a microbatch that warms up."""
        wanted = {
            "max_tokens_per_microbatch": layout.max_tokens_per_microbatch,
            "activation_checkpointing": layout.activation_checkpointing,
        }
        settings = self._settings.model_copy(update=wanted)
        if self._learner is None:
            model = ModelConfig(path=str(self._directory))
            self._learner = PolicyLearner(model, self._settings, AlgorithmConfig())
        reshard(self._learner, layout, settings)
        draw = np.random.default_rng(context)
        samples = [random_sample(draw, context, self._vocabulary, number=n) for n in range(count)]
        try:
            self._learner.update(samples[: together(layout, context, count)], iteration=0)
            began = now()
            self._learner.update(samples, iteration=0)
            return context * count / (now() - began)
        except Exception:
            # Torch before 2.13 does not go on after a pass that was cut off.
            self._learner = None
            raise


class Decoding:
    """A torch engine whose sequences count as read."""

    def __init__(self, directory: Path, given: argparse.Namespace, vocabulary: int) -> None:
        self._directory, self._given, self._vocabulary = directory, given, vocabulary
        self._engine: TorchEngine | None = None

    def cells(self, context: int, until: float) -> list[Cell]:
        """Every number of sequences."""
        layouts = {n: ENGINE._replace(max_running_requests=n) for n in self._given.sequences}
        found = in_turns(
            {
                layout: lambda n=n: attempt(lambda: asyncio.run(self._rate(context, n)))
                for n, layout in layouts.items()
            },
            self._given.repetitions,
            until,
        )
        return [
            Cell("torch", ENGINE, context, count, *found[layout])
            for count, layout in layouts.items()
        ]

    async def _rate(self, context: int, count: int) -> float:
        """Tokens/s, after a pass that makes room for keys and values."""
        # A fresh one: a cache that could not grow is not whole any more.
        engine = TorchEngine(
            self._directory, dtype="bfloat16", max_running_requests=max(self._given.sequences)
        )
        try:
            await engine.start()
            length, generated = context - self._given.generated, self._given.generated
            tokens = np.random.default_rng(0).integers(3, self._vocabulary, length).tolist()
            requests = [
                GenerationRequest(n, tokens, generated, temperature=1.0, seed=n)
                for n in range(count)
            ]
            for number in range(count):
                # Only the last token is computed; what the others left does not change the time.
                engine._cache.row(number).tokens[:] = tokens[:-1]
            await engine.generate(requests)
            began = now()
            await engine.generate(requests)
            return count * generated / (now() - began)
        finally:
            await engine.stop()


_UPDATE_SHARE = 0.7
"""Part of the time that is the update's."""


def measure(given: argparse.Namespace, directory: Path) -> LiveTable:
    """Everything, the update first. Files are written after each context, in case it is ended."""
    shape, longest = SHAPES[given.model], max(given.contexts)
    began = time.monotonic()
    save_random_model(shape, directory, positions=longest)
    table = LiveTable(model_shape(shape, longest), hardware(), longest)
    # What lies between is interpolated, so the ends come first.
    contexts = list(dict.fromkeys([min(given.contexts), longest, *sorted(given.contexts)]))
    for kind, share in ((Update, _UPDATE_SHARE), (Decoding, 1.0)):
        stage = kind(directory, given, shape.vocabulary)
        for number, context in enumerate(contexts):
            now, end = time.monotonic(), began + share * given.seconds
            if number > 1 and now > end:
                print(f"no time is left for {context} tokens and beyond", flush=True)
                break
            until = now + (end - now) / (len(contexts) - number)
            found = stage.cells(context, until)
            table.cells += found
            for cell in (cell for cell in found if not cell.alias):
                row = row_of(table, cell)
                print(
                    ", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True
                )
            with redirect_stdout(io.StringIO()):
                report(table, given, {}, ["It was ended before all was measured."])
        del stage
        free()
    return table


def report(
    table: LiveTable, given: argparse.Namespace, headline: dict[str, float], notes: list[str]
) -> None:
    """Print the table and write the files."""
    if given.raw:
        table.write(given.raw)
    rows = [row_of(table, cell) for cell in table.cells if not cell.alias]
    notes = notes_of(table, given) + notes
    publish(Report("selector_single", TITLE, rows, headline, notes), given)


def row_of(table: LiveTable, cell: Cell) -> Row:
    """One measured cell."""
    update = not cell.engine
    memory = memory_model(table.model, table.hardware)
    formula = memory.training(cell.candidate, float(cell.context), TrainingNeeds())
    row: Row = {
        "stage": "update" if update else "rollout",
        "layout": cell.candidate.label if update else f"{cell.requests} in flight",
        "context": cell.context,
        "samples": cell.requests,
        "tokens/s A": from_a(cell) if cell.a else None,
        "tokens/s B": from_b(cell) if cell.b else None,
        "peak GiB": cell.peak / 2**30 or None,
        "formula GiB": formula.total / 2**30 if update else None,
        "note": "" if cell.a else "out of memory",
    }
    return row


def notes_of(table: LiveTable, given: argparse.Namespace) -> list[str]:
    """Write the notes that a reader of the numbers needs."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, for show"
    errors = [
        abs(float(row["formula GiB"] or 0) / float(row["peak GiB"]) - 1)
        for row in (row_of(table, cell) for cell in table.cells if not cell.engine)
        if row["peak GiB"]
    ]
    notes = [
        f"On {name}, {given.model}. Sets A and B: at most {given.repetitions} repetitions each, in "
        "turns; medians. A cell without rates ran out of memory. Budgets that cut samples alike "
        "are one row.",
        f"Update: one optimizer step on {given.step_tokens} tokens. Rollout: {given.generated} "
        "tokens of each sequence, whose earlier ones count as read. Engine and learner are not on "
        "the device at the same time. Switches cost nothing here.",
    ]
    if errors:
        middle = sorted(errors)[len(errors) // 2]
        notes.append(
            f"Memory formula of the update, not calibrated: off by {100 * middle:.0f} % in the "
            f"median row, by {100 * max(errors):.0f} % in the worst."
        )
    return notes


def main() -> None:
    """Measure, replay, report."""
    given = options()
    if not torch.cuda.is_available() and not given.smoke:
        print("This benchmark needs a CUDA device, and there is none here: it was not run.")
        return
    with tempfile.TemporaryDirectory(prefix="earl-benchmark-") as directory:
        table = measure(given, Path(directory))
    report(table, given, *replay(table))


if __name__ == "__main__":
    main()

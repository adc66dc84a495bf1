"""Model FLOPs utilisation of the update on one GPU, from 4K to 32K tokens of context.

Random models in the shapes of known ones are updated by the `PolicyLearner`, as in a run: bf16
copies of float32 weights compute, packed samples with variable-length attention, log-probs of the
trained tokens, policy loss, gradient clipping and one AdamW step for all microbatches. Each cell is
the median of several updates, from the call to the idle device, after one that warms up (and
compiles). `MFU` is the model's FLOPs (printed with the table) over time and over the GPU's
datasheet rate for dense bf16. A cell that does not fit into memory says so.

Run it as `python -m benchmarks.gpu.update_mfu` from the repository's root; `--smoke` runs a tiny
model, also on a CPU, to show that it works.
"""

from __future__ import annotations

import argparse
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stage_deployment import CHECKPOINTING, Checkpointing
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.selector.model.devices import DEVICES, find_devices
from earl_core.system.memory import is_out_of_memory
from tools.harness import Report, Row, parser, publish, shown
from tools.shapes import FORMULA, SHAPES, Shape, random_sample, save_random_model

TITLE = "Model FLOPs utilisation of the update"


@dataclass(frozen=True)
class Setting:
    """Settings that a learner is built for."""

    shape: Shape
    checkpointing: Checkpointing
    compiled: bool


def options() -> argparse.Namespace:
    made = parser(__doc__ or "", smoke=True)
    made.add_argument(
        "--models",
        nargs="+",
        choices=SHAPES,
        metavar="NAME",
        help=f"of {', '.join(SHAPES)}; the 0.5b and the 1.5b one if not given",
    )
    made.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="tokens of each sample; 4096 to 32768 if not given",
    )
    made.add_argument(
        "--microbatch-tokens",
        type=int,
        default=UpdateConfig().tokens_per_microbatch(gpu=True),
        metavar="TOKENS",
        help="tokens of a microbatch where the context is shorter",
    )
    made.add_argument(
        "--step-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of an optimizer step; 131072 (quick: 65536) if not given",
    )
    made.add_argument("--repetitions", type=int, help="updates measured; 3 (quick: 1) if not given")
    made.add_argument(
        "--logits-chunk-tokens",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="trained tokens whose logits exist at a time",
    )
    made.add_argument(
        "--checkpointing",
        nargs="+",
        choices=CHECKPOINTING,
        default=("none", "full"),
        metavar="RUNG",
    )
    made.add_argument("--compile", choices=("on", "off", "both"), default="both")
    made.add_argument("--peak-tflops", type=float, help="datasheet rate, if not known here")
    made.add_argument(
        "--seconds", type=float, default=480.0, help="start no further cell after this long"
    )
    return _filled(made.parse_args())


def _filled(given: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults, which depend on `--smoke` and `--quick`."""
    if given.smoke:
        given.models = given.models or ["tiny"]
        given.contexts = given.contexts or [128, 512]
        given.microbatch_tokens = min(given.microbatch_tokens, 512)
        given.step_tokens = given.step_tokens or 1024
    small = given.quick or given.smoke
    given.models = given.models or (
        ["qwen2.5-0.5b"] if given.quick else ["qwen2.5-0.5b", "qwen2.5-1.5b"]
    )
    given.contexts = given.contexts or (
        [4096, 32768] if given.quick else [4096, 8192, 16384, 32768]
    )
    given.step_tokens = given.step_tokens or (65536 if given.quick else 131072)
    given.repetitions = given.repetitions or (1 if small else 3)
    return given


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repetitions: int) -> list[float]:
    """Seconds of each repetition, until the device is idle."""
    seconds = []
    for _ in range(repetitions):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def build(
    setting: Setting, directory: Path, microbatch_tokens: int, chunk_tokens: int
) -> PolicyLearner:
    return PolicyLearner(
        ModelConfig(path=str(directory)),
        UpdateConfig(
            precision="bf16",
            max_tokens_per_microbatch=microbatch_tokens,
            activation_checkpointing=setting.checkpointing,
            compile=setting.compiled,
        ),
        AlgorithmConfig(),
        logits_chunk_tokens=chunk_tokens,
    )


def samples_of(context: int, tokens: int, vocabulary: int) -> list[TrainingSample]:
    rng = np.random.default_rng(context)
    return [
        random_sample(rng, context, vocabulary, number=number)
        for number in range(max(1, tokens // context))
    ]


def measure(
    learner: PolicyLearner, setting: Setting, samples: list[TrainingSample], repetitions: int
) -> Row:
    lengths = [len(sample.tokens) for sample in samples]
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    [warm_up] = timed(lambda: learner.update(samples, iteration=0), 1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    metrics: dict[str, float] = {}

    def update() -> None:
        metrics.update(learner.update(samples, iteration=0))

    seconds = statistics.median(timed(update, repetitions))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "tokens/s": sum(lengths) / seconds,
        "TFLOP/s": setting.shape.update_flops(lengths, trained) / seconds / 1e12,
        "peak GiB": None if peak is None else peak / 2**30,
        "microbatches": int(metrics["microbatches"]),
        "update s": seconds,
        "warm-up s": warm_up,
    }


def attention_rates(shape: Shape, context: int, device: torch.device) -> Row:
    """TFLOP/s of attention alone, forward and backward: ours, and cuDNN's for a single sample."""
    if device.type != "cuda":
        return {}
    boundaries = SampleBoundaries.from_lengths([context], device)

    def states(heads: int) -> torch.Tensor:
        made = torch.randn(1, heads, context, shape.head_dim, device=device, dtype=torch.bfloat16)
        return made.requires_grad_()

    query, key, value = states(shape.heads), states(shape.kv_heads), states(shape.kv_heads)
    flops = 3 * 4 * shape.heads * shape.head_dim * (context * (context + 1) // 2)

    def ours() -> None:
        attended, _ = varlen_attention(
            torch.nn.Module(), query, key, value, None, sample_boundaries=boundaries
        )
        attended.backward(torch.ones_like(attended))

    def cudnn() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
            )
            attended.backward(torch.ones_like(attended))

    rates: Row = {}
    for name, work in {"varlen attention TFLOP/s": ours, "cuDNN attention TFLOP/s": cudnn}.items():
        with suppress(RuntimeError):
            timed(work, 3)
            rates[name] = flops / statistics.median(timed(work, 10)) / 1e12
    return rates


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a large bf16 matrix product on this machine."""
    size = 8192 if device.type == "cuda" else 512
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    timed(lambda: factor @ factor, 5)
    return 2 * size**3 / statistics.median(timed(lambda: factor @ factor, 20)) / 1e12


def datasheet_peak(given: argparse.Namespace) -> float | None:
    if given.peak_tflops is not None or not torch.cuda.is_available():
        return given.peak_tflops  # type: ignore[no-any-return]
    known = find_devices(torch.cuda.get_device_name())
    return DEVICES[known[0]].flops / 1e12 if known else None


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    choices = {"on": (True,), "off": (False,), "both": (False, True)}
    for model in given.models:
        for compiled in choices[given.compile]:
            for checkpointing in given.checkpointing:
                yield Setting(SHAPES[model], checkpointing, compiled)


class Benchmark:
    """Collects the rows; the files are written after each setting, in case time runs out."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._until = time.monotonic() + given.seconds
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._peak = datasheet_peak(given)
        self._matrix = matrix_rate(self._device)
        self._attention: dict[tuple[str, int], Row] = {}
        self._rows: list[Row] = []

    def run(self, setting: Setting, directory: Path) -> None:
        """All contexts with one learner for each microbatch size."""
        given = self._given
        learner: PolicyLearner | None = None
        built_for = 0
        for context in given.contexts:
            if time.monotonic() > self._until:
                break
            row: Row = {
                "model": setting.shape.name,
                "context": context,
                "checkpointing": setting.checkpointing,
                "compile": "on" if setting.compiled else "off",
            }
            budget = max(context, given.microbatch_tokens)
            samples = samples_of(context, given.step_tokens, setting.shape.vocabulary)
            try:
                if learner is None or budget != built_for:
                    learner = None
                    free()
                    learner = build(setting, directory, budget, given.logits_chunk_tokens)
                    built_for = budget
                row |= measure(learner, setting, samples, given.repetitions)
                row["MFU"] = self._share(float(row["TFLOP/s"] or 0.0))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                row["note"] = "out of memory"
                learner = None
            free()
            row |= self._attention_of(setting.shape, context)
            self._rows.append(row)
            print(", ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)

    def _attention_of(self, shape: Shape, context: int) -> Row:
        key = (shape.name, context)
        if key not in self._attention:
            self._attention[key] = attention_rates(shape, context, self._device)
        return self._attention[key]

    def _share(self, rate: float) -> float | None:
        return None if self._peak is None else rate / self._peak

    def save(self) -> None:
        """Write the files that were asked for, without printing the table."""
        with redirect_stdout(io.StringIO()):
            self.report()

    def report(self) -> None:
        """Print the table and write the files."""
        publish(Report("update_mfu", TITLE, self._rows, self._quoted(), self._notes()), self._given)

    def _quoted(self) -> dict[str, float]:
        """The best setting of the largest model at the shortest and at the longest context."""
        found = {}
        for context in (4096, 32768):
            shares = [
                float(row["MFU"])
                for row in self._rows
                if row["context"] == context
                and row["model"] == self._given.models[-1]
                and row.get("MFU") is not None
            ]
            if shares:
                found[f"update_mfu_{context // 1024}k"] = max(shares)
        return found

    def _notes(self) -> list[str]:
        given = self._given
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "a CPU"
        peak = (
            f"{self._peak:.3g} TFLOP/s, dense bf16, by its datasheet"
            if self._peak is not None
            else "not known (give --peak-tflops), so there is no MFU"
        )
        return [
            f"On {name}; peak: {peak}; a large bf16 matrix product was measured at "
            f"{self._matrix:.3g} TFLOP/s.",
            FORMULA,
            f"An update is one optimizer step over {given.step_tokens} tokens in samples of "
            f"`context` tokens, half of them trained, packed into microbatches of "
            f"max(context, {given.microbatch_tokens}) tokens; logits of at most "
            f"{given.logits_chunk_tokens} tokens at a time. Median of {given.repetitions}; "
            "`warm-up s` is the first update, compilation included.",
            "`compile`: `update.compile`, each layer by itself, around attention, which keeps one "
            "product more than selective checkpointing. The attention columns are "
            "forward and backward pass of attention alone, one sample, with the same formula.",
        ]


def free() -> None:
    """Give back what the last measurement left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    given = options()
    if not torch.cuda.is_available() and not given.smoke:
        print("This benchmark needs a CUDA device, and there is none here: nothing was measured.")
        return
    benchmark = Benchmark(given)
    with tempfile.TemporaryDirectory(prefix="earl-benchmark-") as directory:
        for setting in settings(given):
            path = Path(directory) / setting.shape.name
            if not path.exists():
                save_random_model(setting.shape, path, positions=max(given.contexts))
                free()
            benchmark.run(setting, path)
            benchmark.save()
    benchmark.report()


if __name__ == "__main__":
    main()

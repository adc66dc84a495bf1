"""Bounds of the MFU of the update on one H200: every operator at the GPU's ceilings.

One optimizer step of the `PolicyLearner` runs on fake tensors, which have sizes and no data. Every
operator of it is booked with its FLOPs and the bytes that it reads and writes, and takes the longer
of computing and moving these at the ceilings; launches, synchronisations and the host take nothing.
So the MFU is one that a run stays below, computed and not measured. The compiled kernels are those
of torch.compile's schedule for an H200 (`kernels`).

Two depths are run, and the step of a whole model is on the line through them, because its layers
are alike. Run it as `python -m benchmarks.gpu.update_roofline` from the repository's root; it needs
no GPU, and takes a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu.kernels import CountedCompiler
from benchmarks.gpu.operators import Ceilings, Entries, Ledger, Recorder, Work
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner import logit_passes, policy_learner, token_logprobs
from earl_core.learner.attention import attention_plan, varlen_cuda
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import gathered_table, split_table
from earl_core.learner.data.zero_advantage import Skipped
from earl_core.learner.model import settle
from earl_core.learner.parallel.mesh import ALONE, UpdateMesh
from earl_core.learner.parallel_model import ParallelModel, parallelize
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.routing_tally import RoutingTally
from earl_core.learner.update_metrics import UpdateMetrics
from earl_core.selector.model.sizes import positions_at_a_time
from earl_core.tensors.collectives import Ranks
from tools.harness import Report, Row, parser, publish
from tools.shapes import FORMULA, SHAPES, Shape, random_sample

TITLE = "Roofline of the update on one H200 (computed, not measured)"
# The depths that are run.
_SHALLOW, _DEEP = 1, 2
_KEY = ("model", "context", "microbatch", "part", "operator")
# A gradient's norm that is clipped, as it is in most steps.
_NORM = 100.0


@dataclass(frozen=True)
class Cell:
    """An optimizer step: samples of `context` tokens, packed into microbatches."""

    shape: Shape
    context: int
    microbatch_tokens: int
    step_tokens: int
    compiled: bool

    def samples(self) -> list[TrainingSample]:
        rng = np.random.default_rng(0)
        return [
            random_sample(rng, self.context, self.shape.vocabulary, number=number)
            for number in range(max(1, self.step_tokens // self.context))
        ]

    def model_flops(self) -> float:
        samples = self.samples()
        trained = sum(int(sample.loss_mask.sum()) for sample in samples)
        return self.shape.update_flops([len(sample.tokens) for sample in samples], trained)


def step(cell: Cell, ceilings: Ceilings | None = None) -> Entries:
    """The operators of one optimizer step, by part of the update and name."""
    shallow, deep = (
        _operators(
            dataclasses.replace(cell, shape=dataclasses.replace(cell.shape, layers=layers)),
            ceilings or Ceilings(),
        )
        for layers in (_SHALLOW, _DEEP)
    )
    more = (cell.shape.layers - _DEEP) / (_DEEP - _SHALLOW)
    return {
        key: work + (work + shallow.get(key, Work()) * -1.0) * more for key, work in deep.items()
    }


def utilisation(cell: Cell, entries: Entries, ceilings: Ceilings | None = None) -> float:
    """Model FLOPs over the step's time and the GPU's datasheet rate."""
    return cell.model_flops() / seconds(entries) / (ceilings or Ceilings()).datasheet


def seconds(entries: Entries) -> float:
    return sum(work.seconds for work in entries.values())


def _operators(cell: Cell, ceilings: Ceilings) -> Entries:
    recorder = Recorder(Ledger(ceilings, "backward"), _NORM)
    compiler = CountedCompiler(recorder)
    samples = cell.samples()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _as_on_a_gpu(compiler),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
    ):
        learner = _learner(cell)
        with recorder, _parts(learner, recorder.ledger):
            # One microbatch compiles, and makes the optimizer's state.
            with recorder.paused():
                _step(learner, samples[: cell.microbatch_tokens // cell.context])
            recorder.ledger.entries.clear()
            graphs = compiler.graphs
            _step(learner, samples)
    if compiler.graphs != graphs or bool(graphs) != cell.compiled:
        raise RuntimeError(f"{graphs} graphs were compiled, then {compiler.graphs - graphs} more.")
    return recorder.ledger.entries


def _learner(cell: Cell) -> PolicyLearner:
    """Make a learner as in a run, but for its weights, which are fake and so not loaded."""
    mesh = UpdateMesh(ALONE, 0, torch.device("cpu"))

    def fake_policy(*_: Any, mixed: bool, chunk_tokens: int | None, **__: Any) -> ParallelModel:
        model = AutoModelForCausalLM.from_config(cell.shape.config(cell.context))
        settle(model)
        return parallelize(model, mesh, mixed=mixed, chunk_tokens=chunk_tokens)

    with (
        patch.object(policy_learner, "load_policy", fake_policy),
        patch.object(policy_learner, "load_tokenizer", lambda *_: None),
    ):
        return PolicyLearner(
            ModelConfig(path=cell.shape.name),
            UpdateConfig(
                precision="bf16",
                max_tokens_per_microbatch=cell.microbatch_tokens,
                compile=cell.compiled,
            ),
            AlgorithmConfig(),
            mesh=mesh,
            logits_chunk_tokens=positions_at_a_time(cell.shape.vocabulary, gpu=True),
        )


def _step(learner: PolicyLearner, samples: Sequence[TrainingSample]) -> None:
    """One optimizer step over all samples, without the metrics that need their values."""
    table, own = gathered_table(learner._ranks, samples, Skipped().table, learner.whole_episodes)
    [minibatch] = split_table(table, own, 1, seed=0, iteration=0, epoch=0)
    algorithm = learner._algorithm
    plan = learner._plan(samples, minibatch.rows, algorithm)
    learner._step(
        samples, minibatch, plan, len(plan), algorithm,
        metrics=UpdateMetrics(1e-6, RoutingTally(Ranks(), 0.0)), iteration=0, compared=False,
        before_step=None, report=None,
    )  # fmt: skip


@contextmanager
def _as_on_a_gpu(compiler: CountedCompiler) -> Iterator[None]:
    """Let the learner's code take the ways that it takes on a GPU.

    torch built for a CPU differentiates no fake tensor that says it is on a GPU; these say that
    they are on the CPU, and the learner's own questions are answered for a GPU.
    """

    real = torch.compile

    def compile_counted(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        # Its schedule is for sizes that are known.
        return real(function, backend=compiler, dynamic=False)

    torch._dynamo.reset()
    with (
        patch.object(FakeTensor, "is_cuda", True, create=True),
        patch.object(attention_plan, "kernel_calls_wanted", lambda _: True),
        patch.object(varlen_cuda, "usable", lambda *_: True),
        patch.object(torch, "compile", compile_counted),
        patch.object(logit_passes, "_compiled", cache(compile_counted)),
    ):
        yield


@contextmanager
def _parts(learner: PolicyLearner, ledger: Ledger) -> Iterator[None]:
    """Book the parts of an update apart; what is in none of them is its backward pass."""
    scores = token_logprobs._TokenLogprobs
    with ExitStack() as stack:
        for owner, name, part in (
            (learner, "_forward", "forward"),
            (scores, "forward", "head, forward"),
            (scores, "backward", "head, backward"),
            (learner._gradients, "clip", "clipping"),
            (learner.optimizer, "step", "optimizer"),
        ):
            booked = ledger.of(part)(getattr(owner, name))
            made = staticmethod(booked) if owner is scores else booked
            stack.enter_context(patch.object(owner, name, made))
        yield


def options() -> argparse.Namespace:
    made = parser(__doc__ or "", smoke=True)
    made.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b"])
    made.add_argument("--contexts", nargs="+", type=int, default=[4096, 32768], metavar="TOKENS")
    made.add_argument(
        "--microbatch-tokens",
        nargs="+",
        type=int,
        default=[16384, 4096],
        metavar="TOKENS",
        help="tokens of a microbatch where the context is shorter",
    )
    made.add_argument(
        "--step-tokens",
        type=int,
        default=131072,
        metavar="TOKENS",
        help="tokens of an optimizer step",
    )
    given = made.parse_args()
    if given.smoke:
        given.models, given.contexts = ["tiny"], [512]
        given.microbatch_tokens, given.step_tokens = [512], 1024
    return given


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    for model in given.models:
        for context in given.contexts:
            sizes = dict.fromkeys(max(context, tokens) for tokens in given.microbatch_tokens)
            for tokens in sizes:
                for compiled in (False, True):
                    yield Cell(
                        SHAPES[model], context, tokens, max(tokens, given.step_tokens), compiled
                    )


class Benchmark:
    """One row for each operator of a cell, the longest first; eager and compiled side by side."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str | int, ...], Row] = {}
        self._headline: dict[str, float] = {}
        self._parts: list[str] = []

    def add(self, cell: Cell) -> None:
        entries = step(cell)
        whole, how = seconds(entries), "compiled" if cell.compiled else "eager"
        for (part, name), work in sorted(entries.items(), key=lambda item: -item[1].seconds):
            key = (cell.shape.name, cell.context, cell.microbatch_tokens, part, name)
            row = self._rows.setdefault(key, dict(zip(_KEY, key, strict=True)))
            row[f"{how} calls"] = round(work.calls)
            row["GFLOP"] = work.flops / 1e9
            row[f"{how} GB"] = work.bytes / 1e9
            row[f"{how} ms"] = 1e3 * work.seconds
            row[f"{how} %"] = 100 * work.seconds / whole
        name = f"{cell.shape.name}, context {cell.context}, microbatch {cell.microbatch_tokens}"
        share = utilisation(cell, entries)
        self._headline[f"MFU at most, {name}, {how}"] = share
        spent: dict[str, float] = {}
        for (part, _), work in entries.items():
            spent[part] = spent.get(part, 0.0) + 1e3 * work.seconds
        of = ", ".join(f"{part} {value:.0f}" for part, value in spent.items())
        self._parts.append(f"{name}, {how}: {1e3 * whole:.0f} ms ({of}).")
        print(f"MFU at most {share:.3f}: {self._parts[-1]}", flush=True)

    def report(self, given: argparse.Namespace) -> None:
        written = [*self._parts, *notes(given)]
        rows = list(self._rows.values())
        publish(Report("update_roofline", TITLE, rows, self._headline, written), given)


def notes(given: argparse.Namespace) -> list[str]:
    most = Ceilings()
    return [
        f"Ceilings: {most.products / 1e12:g} TFLOP/s of bf16 products ({most.float32 / 1e12:g} of "
        f"float32 ones), {most.bandwidth / 1e12:g} TB/s, attention "
        f"{most.attention_forward / 1e12:g} TFLOP/s forward and {most.attention_backward / 1e12:g} "
        f"backward; MFU against {most.datasheet / 1e12:g} TFLOP/s.",
        FORMULA,
        "The attention kernel's backward pass computes the scores again: 2.5 times the FLOPs of "
        "its forward pass, in its time but not in the MFU.",
        f"A step is one optimizer step over {given.step_tokens} tokens in samples of `context` "
        "tokens, half of them trained, packed into microbatches of `microbatch` tokens; without "
        "activation checkpointing. `benchmarks.gpu.update_mfu` measures such cells, by default "
        "with microbatches of 16384 tokens.",
        "`compiled`: the decoder layers, and what is done element by element with the logits, are "
        "compiled; names of fused kernels list the operators in them.",
        "A kernel reads and writes each number of its tensors once; caches keep nothing between "
        "kernels.",
    ]


def main() -> None:
    given = options()
    benchmark = Benchmark()
    for cell in cells(given):
        benchmark.add(cell)
    benchmark.report(given)


if __name__ == "__main__":
    main()

"""The update stage beside plain torch loops (the limit) and TRL's update (the peer).

All sides train SmolLM2 once on the same recorded episodes, with the same loss, optimizer and
precision. Each measurement is a fresh process: it warms up with one update and measures others.
Rounds go through the sides in alternating order, so that a machine that becomes slower slows all;
ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.iteration_sides import shared_settings, trl_python
from benchmarks.update_cases import (
    ADAPTER,
    ADAPTER_RANK,
    APART,
    CASES,
    COMPILED,
    COMPUTE,
    EARL,
    LOOP_OF,
    PLAIN,
    QUICK,
    ROUTED,
    SIDES,
    SINGLE,
    SKIP,
    SKIPPED,
    TRL,
    Case,
)
from benchmarks.update_episodes import workload
from benchmarks.update_models import MOE, save_model
from benchmarks.update_routing import add_routing
from earl_core.cluster.host import local_hosts
from earl_core.config import RunConfig, load_config
from earl_core.control.hardware import read_hardware
from earl_core.control.precision import decide
from tools.harness import REPOSITORY, Report, Row, interval, median, parser, publish
from tools.process_tree import TIMEOUT_SECONDS, CommandFailed

_MEMORY_SHARE = 0.85


# A machine without a GPU takes half an hour for the case; it says nothing that 4k does not.
_GPU_ONLY = ("16k fp32",)

Update = dict[str, float]


class Runner:
    """Starts sides and collects what they measured."""

    def __init__(self, config: RunConfig, options: argparse.Namespace, scratch: Path) -> None:
        self._config = config
        self._file = options.config
        self._scratch = scratch
        self._threads = options.threads
        self._memory_bytes = int(options.memory_gib * 2**30)
        self._started = 0
        self.models = {"": str(config.model.path)}
        """What each is, for people."""

    def run(self, case: Case, side: str, device_batch: int = 1) -> tuple[list[Update], Any]:
        """The measured updates of one process, and its norm. Raises `CommandFailed`."""
        self._started += 1
        stem = self._scratch / f"{self._started:03d}-{side}"
        settings = self._settings(case, side, device_batch)
        settings["results"] = str(stem.with_suffix(".results"))
        stem.with_suffix(".json").write_text(json.dumps(settings), encoding="utf-8")
        module = "benchmarks.trl_update" if side == TRL else "benchmarks.update_side"
        python = str(trl_python(False)) if side == TRL else sys.executable
        log = stem.with_suffix(".log")
        with log.open("wb") as stream:
            done = subprocess.run(
                [python, "-m", module, str(stem.with_suffix(".json"))],
                cwd=REPOSITORY,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_SECONDS,
            )
        if done.returncode:
            raise CommandFailed(log.read_text(encoding="utf-8", errors="replace")[-4000:])
        found = json.loads(Path(settings["results"]).read_text(encoding="utf-8"))
        return found["updates"], found["norm"]

    def _model(self, name: str) -> str:
        """The path of one of `update_models`, made when it is first asked for; or the configured
        one's."""
        if not name:
            return self._config.model.path
        place = self._scratch / name
        if name not in self.models:
            self.models[name] = save_model(name, place)
        return str(place)

    def _settings(self, case: Case, side: str, device_batch: int) -> dict[str, Any]:
        long = case.tokens is not None
        model = self._model(case.model)
        return {
            **shared_settings(self._config),
            "model": model,
            "config": str(self._file),
            "overrides": [
                f"model.path={model}",
                f"update.precision={case.precision}",
                f"update.activation_checkpointing={'full' if long else 'none'}",
                f"update.threads={self._threads}",
                *([f"model.adapter.rank={ADAPTER_RANK}"] if side == ADAPTER else []),
            ],
            "loop": LOOP_OF[side],
            "skips": side == SKIP,
            "apart": side == APART,
            "estimator": case.estimator,
            "compile": side == COMPILED,
            "precision": case.precision,
            "activation_checkpointing": long,
            "max_tokens_per_microbatch": self._config.update.max_tokens_per_microbatch,
            "tokens": case.tokens,
            "count": case.count,
            "group_size": case.group_size,
            "updates": case.updates,
            "device_batch": device_batch,
            "threads": self._threads,
            "memory_bytes": self._memory_bytes,
        }


@dataclass
class Measured:
    """One case: per side the updates of each round (a round that failed is not there)."""

    case: Case
    tokens: int
    rounds: dict[str, list[list[Update]]]

    def seconds(self, side: str) -> float:
        """Median over all updates."""
        return median([update["seconds"] for found in self.rounds[side] for update in found])

    def ratios(self, side: str, what: str = "seconds") -> list[float]:
        """Seconds of that side over those of EARL, the first side, within each round."""
        pairs = zip(self.rounds[side], self.rounds[self.case.first], strict=False)
        return [
            median([update[what] for update in theirs]) / median([update[what] for update in ours])
            for theirs, ours in pairs
        ]

    def row(self, side: str) -> Row:
        """The side's row of the table."""
        updates = [update for found in self.rounds[side] for update in found]
        memory = "peak_cuda_bytes" if "peak_cuda_bytes" in updates[0] else "peak_rss_bytes"
        return {
            "case": self.case.title,
            "side": SIDES[side],
            "tokens/s": self.tokens / self.seconds(side),
            "s/update": self.seconds(side),
            "range": interval([update["seconds"] for update in updates]),
            "CPU s": median([update["cpu_seconds"] for update in updates]),
            "tokens": self.tokens,
            "tokens computed": round(median([update["computed"] for update in updates])),
            "peak GiB": max(update[memory] for update in updates) / 2**30,
            "its time over EARL's": median(self.ratios(side)),
            "its CPU s over EARL's": median(self.ratios(side, "cpu_seconds")),
        }


def _seconds(updates: Sequence[Update]) -> float:
    return median([update["seconds"] for update in updates])


def measure(case: Case, runner: Runner, report: Report) -> Measured:
    """All rounds of one case. A side that fails gets a note and is left out; EARL may not."""
    lengths = [len(episode) for episode in workload(case.tokens, case.count)]
    rounds: dict[str, list[list[Update]]] = {side: [] for side in case.sides}
    batches = {TRL: _best_batch(case, runner, report)} if TRL in case.sides else {}
    left = [side for side in case.sides if side != TRL or batches[TRL]]
    for number in range(case.rounds):
        norms: dict[str, float] = {}
        for side in list(left)[:: -1 if number % 2 else 1]:
            try:
                updates, norm = runner.run(case, side, batches.get(side, 1))
            except CommandFailed as failure:
                if side == case.first:
                    raise
                report.notes.append(f"{case.title}: {SIDES[side]} failed: {failure.reason}")
                left.remove(side)
                continue
            rounds[side].append(updates)
            if norm is not None and side != ADAPTER:
                norms[side] = norm
        _check_norms(case, norms)
    if TRL in left:
        report.notes.append(
            f"{case.title}: TRL trains {batches[TRL]} row(s) at a time, of {case.device_batches}."
        )
    report.notes.append(f"{case.title}: {runner.models[case.model]}.")
    if case.model and PLAIN in rounds:
        report.notes.append(f"{case.title}: {ROUTED}")
    report.notes.append(
        f"{case.title}: {case.count} samples of {min(lengths)} to {max(lengths)} tokens, "
        f"{case.rounds} round(s) of {case.updates} measured update(s)."
    )
    return Measured(case, sum(lengths), {side: found for side, found in rounds.items() if found})


def _best_batch(case: Case, runner: Runner, report: Report) -> int:
    """The fastest of the device batches for TRL; 0 when all fail."""
    if len(case.device_batches) == 1:
        return case.device_batches[0]
    tried: list[tuple[float, int]] = []
    for size in case.device_batches:
        try:
            updates, _ = runner.run(replace(case, updates=1), TRL, size)
        except CommandFailed as failure:
            report.notes.append(
                f"{case.title}: TRL with {size} rows at a time failed: {failure.reason}"
            )
            continue
        tried.append((_seconds(updates), size))
    return min(tried)[1] if tried else 0


def _check_norms(case: Case, norms: dict[str, float]) -> None:
    """Sides that do the same work have the same gradients."""
    tolerance = 0.05 if case.precision == "bf16" else 1e-3
    if norms and max(norms.values()) > (1 + tolerance) * min(norms.values()):
        raise RuntimeError(f"{case.title}: the sides' gradient norms differ: {norms}")


_OF_MODELS = {
    PLAIN: "update_share_of_plain_torch",
    APART: "update_tree_speedup",
    SINGLE: "update_speedup_vs_single_samples",
}
"""Headlines of cases with a random model: its name is added."""


def fill(report: Report, found: Sequence[Measured]) -> None:
    """Rows, and the worst case of each comparison as the headline, long contexts apart."""
    for measured in found:
        report.rows += [measured.row(side) for side in measured.rounds]
    skipping = [median(each.ratios(COMPUTE)) for each in found if COMPUTE in each.rounds]
    if skipping:
        report.headline["zero_advantage_speedup"] = min(skipping)
        report.notes.append(SKIPPED)
    for each in found:
        for side, name in _OF_MODELS.items():
            if each.case.model and side in each.rounds:
                headline = f"{name}_{each.case.model}"
                report.headline[headline] = median(each.ratios(side))
    compared = [each for each in found if each.case.first == EARL and not each.case.model]
    for suffix, long in (("", False), ("_long_contexts", True)):
        cases = [each for each in compared if (each.case.tokens is not None) == long]
        for name, side in (("update_share_of_plain_torch", PLAIN), ("update_speedup_vs_trl", TRL)):
            ratios = [median(each.ratios(side)) for each in cases if side in each.rounds]
            if ratios:
                report.headline[name + suffix] = min(ratios)
        pairs = [each for each in cases if ADAPTER in each.rounds]
        if pairs:
            memory = [_peak(each, ADAPTER) / _peak(each, EARL) for each in pairs]
            report.headline[f"adapter_memory_share{suffix}"] = max(memory)
            seconds = [median(each.ratios(ADAPTER)) for each in pairs]
            report.headline[f"adapter_update_seconds_share{suffix}"] = max(seconds)
        memory = [_peak(each, TRL) / _peak(each, EARL) for each in cases if TRL in each.rounds]
        if memory:
            report.headline[f"update_peak_memory_of_trl_over_earl{suffix}"] = min(memory)
    if any(each.case.model == MOE for each in found):
        add_routing(report)
    _explain(report, found)


def _explain(report: Report, found: Sequence[Measured]) -> None:
    """The notes that these sides and cases need."""
    sides = {side for each in found for side in each.rounds}
    report.notes += [
        "tokens/s: tokens of all samples, prompts and observations included, over the seconds of "
        "one whole update: forward, backward, clipping, optimizer step. EARL's seconds include "
        "planning, packing and metrics; the plain loops' packs are made before the clock starts; "
        "TRL's tokenised, padded and scored batch too.",
        "CPU s: processor seconds of all threads together; much less than seconds times threads "
        "means that other programs had the cores.",
        "Tokens computed: tokens that go through the model. Beginnings that samples share are "
        "computed once on EARL's side and in the plain loop with the same packs; TRL's count has "
        "its padding.",
    ]
    if any(each.case.tokens for each in found):
        report.notes.append(
            "Long samples are recorded turns laid one after another until the length is reached; "
            "SmolLM2 was trained for 8,192 positions, which does not change what an update costs. "
            "Activation checkpointing is on for them, on every side."
        )
    if ADAPTER in sides:
        report.notes.append("An adapter's gradient has another norm, that of its pairs alone.")
    report.notes += [
        "Headlines are the worst case of the recorded episodes as they are, and, named apart, of "
        "random models and of the long ones, which share and pad next to nothing.",
        "Peak: resident memory of the process during the update (on a GPU: allocated device "
        "memory), weights, gradients and optimizer state included.",
    ]


def _peak(measured: Measured, side: str) -> float:
    peak = measured.row(side)["peak GiB"]
    assert isinstance(peak, float)
    return peak


def main() -> None:
    options = _options()
    # As Ctrl-C does: the side that runs must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = load_config(options.config)
    others = ", ".join(dict.fromkeys(case.model for case in options.cases if case.model))
    of = (
        f" ({others})"
        if all(case.model for case in options.cases)
        else ": EARL, plain torch and TRL"
    )
    report = Report("update", f"The update{of}")
    with tempfile.TemporaryDirectory(prefix="earl-update-") as scratch:
        runner = Runner(config, options, Path(scratch))
        found = [measure(case, runner, report) for case in options.cases]
    fill(report, found)
    report.notes.insert(
        0,
        f"{options.config}, {options.threads} threads, "
        f"{config.update.max_tokens_per_microbatch} tokens in a microbatch. Measured "
        "seconds are medians, ratios are medians over rounds.",
    )
    if options.quick:
        report.notes.append("--quick: 8 short samples, one round; a rough number.")
    publish(report, options)


def _options() -> argparse.Namespace:
    made = parser("Tokens/s and peak memory of the update on EARL, in plain torch and on TRL.")
    made.add_argument("--config", type=Path, default=Path("earl_core/recipes/demo.yaml"))
    made.add_argument(
        "--cases",
        nargs="+",
        metavar="CASE",
        help=f"which cases: {', '.join(repr(case.title) for case in CASES)}; default: all, but "
        f"{', '.join(_GPU_ONLY)} only with a GPU, and bf16 only where it is fast",
    )
    made.add_argument("--rounds", type=int, help="rounds of every case; default: each its own")
    made.add_argument("--threads", type=int, default=read_hardware().cpu_cores)
    made.add_argument("--no-trl", action="store_true", help="leave TRL out")
    made.add_argument(
        "--memory-gib",
        type=float,
        default=_MEMORY_SHARE * psutil.virtual_memory().total / 2**30,
        help="a side that wants more private memory fails; 0: no limit",
    )
    options = made.parse_args()
    options.cases = _chosen(made, options)
    return options


def _chosen(made: argparse.ArgumentParser, options: argparse.Namespace) -> list[Case]:
    known = {case.title: case for case in CASES}
    here = decide(local_hosts(1)).precision
    if options.cases:
        if unknown := [name for name in options.cases if name not in known]:
            made.error(f"no such case: {', '.join(unknown)}; known: {', '.join(known)}")
        cases = [known[name] for name in options.cases]
    elif options.quick:
        cases = [replace(QUICK, precision=here)]
    else:
        gpu = bool(read_hardware().gpus)
        cases = [case for case in CASES if gpu or case.title not in _GPU_ONLY]
        if here == "fp32":
            # Hours on a machine that computes it slowly; by name they can be had.
            cases = [case for case in cases if case.precision == "fp32"]
    if options.rounds:
        cases = [replace(case, rounds=options.rounds) for case in cases]
    if options.no_trl:
        cases = [
            replace(case, sides=tuple(side for side in case.sides if side != TRL)) for case in cases
        ]
    return cases


if __name__ == "__main__":
    main()

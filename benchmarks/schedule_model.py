"""Seconds of an iteration predicted from lengths and rates, for each schedule and placement.

    python -m benchmarks.asynchronous --keep /tmp/runs
    python -m benchmarks.schedule_model /tmp/runs/runs/*

The model (`benchmarks.schedules`) plays sequences on engines and says what waits for which. Rates
come from the synchronous runs among those given: seconds of a sampled token alone, of a turn (the
environment with it), of each sequence beside, of a trained token, and of all that is no stage. A
run is predicted from its lengths (tokens and turns of its kept episodes) and its schedule by the
rates of the synchronous run of the same environment and engine; how fast the machine was in each
iteration is told by its update, seconds for a token over the rate. Without arguments it makes four
small runs of its own.

Then the same model says what schedules gain from 2 to 1,024 GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.schedule_runs import FIRST, Played, Run, read_run
from benchmarks.schedules import Engine, Speed, Stream, pinned, play
from earl_core.control.dealing import contiguous
from tools.harness import REPOSITORY, Report, Row, median, parser, publish
from tools.process_tree import train


@dataclass(frozen=True)
class Rates:
    """Seconds of a token of a sequence alone, of a turn, what each sequence adds to the token of
    all, of a trained token, of loading weights, and of an iteration outside of stages."""

    token: float
    turn: float
    beside: float
    trained: float
    load: float
    outside: float


def speeds(run: Run, rates: Rates) -> list[float]:
    """How much longer than by the rates the machine took in each iteration, as its update tells; 1
    where workers were still starting."""
    return [
        each.stages["update"] / each.trained / rates.trained if number >= FIRST else 1.0
        for number, each in enumerate(run.played)
    ]


def fit(run: Run) -> Rates:
    """The rates of a synchronous run, none below 0: by least squares of what the model says of its
    rollouts, from several beginnings."""
    measured = run.played[FIRST:]
    trained = median([each.stages["update"] / each.trained for each in measured])
    outside = median([each.wall - each.learning - each.stages["rollout"] for each in measured])
    load = median([each.stages["rollout"] - each.stages["playing"] for each in measured])
    draft = Rates(0, 0, 0, trained, load, outside)
    pairs = list(zip(measured, speeds(run, draft)[FIRST:], strict=True))

    def told(found: Sequence[float]) -> Rates:
        token, turn, beside = map(float, found)
        return replace(draft, token=token, turn=turn, beside=beside)

    def missed(found: Sequence[float]) -> list[float]:
        return [
            max(rollout(run, each, told(found), slow)) - each.stages["playing"]
            for each, slow in pairs
        ]

    shares = [(1.0, 0.1, 0.1), (0.1, 1.0, 0.1), (0.1, 0.1, 1.0)]
    begins = [np.array(each) * begin for each, begin in itertools.product(shares, (1e-3, 1e-1))]
    best = min(
        (least_squares(missed, each, bounds=(0, math.inf), x_scale=each) for each in begins),
        key=lambda found: float(found.cost),
    )
    return told(best.x)


def work(each: Played, rates: Rates, slow: float) -> list[list[float]]:
    """Seconds of each sequence alone, by group."""
    return [
        [slow * rates.token * tokens + rates.turn * turns for tokens, turns in group]
        for group in each.groups
    ]


def beside(run: Run, played: Sequence[Played], rates: Rates, alone: float) -> Speed:
    """How sequences slow each other down that take so many seconds alone, all together."""
    sampled = sum(tokens for each in played for group in each.groups for tokens, _ in group)
    running = run.config.rollout.max_running_requests
    return Speed(rates.beside * sampled / max(alone, 1e-9), running)


def rollout(run: Run, each: Played, rates: Rates, slow: float) -> list[float]:
    """Seconds that each engine plays of a synchronous iteration."""
    groups = work(each, rates, slow)
    speed = beside(run, [each], rates, sum(map(sum, groups)) / slow)
    return [
        play([*itertools.chain(*(groups[n] for n in part))], speed)
        for part in contiguous(range(len(groups)), run.engines)
    ]


def predict(run: Run, rates: Rates, by_machine: bool) -> float:
    """Seconds of an iteration of the run. by_machine: as fast as the machine was in each iteration,
    else as fast as in the run that the rates are of."""
    slower = speeds(run, rates) if by_machine else [1.0] * len(run.played)
    groups = [work(each, rates, slow) for each, slow in zip(run.played, slower, strict=True)]
    training = [
        slow * (rates.trained * each.trained + rates.outside)
        for each, slow in zip(run.played, slower, strict=True)
    ]
    side_by_side = run.config.stages.placed.side_by_side
    engines, staleness = run.engines, run.staleness
    running = run.config.rollout.max_running_requests
    if run.config.schedule.streams:
        # Engines of vLLM hold twice as many, of which half wait for environments.
        live = running * (1 if run.config.rollout.engine == "torch" else 2)
        waits = [each + (0 if side_by_side else rates.load) for each in training]
        alone = sum(itertools.chain(*itertools.chain(*groups)))
        speed = beside(run, run.played, rates, alone)
        published = Stream(
            [*itertools.chain(*groups)],
            waits,
            staleness,
            side_by_side,
            live,
            [Engine(speed) for _ in range(engines)],
        ).run()
    else:
        rollouts = [
            [rates.load + seconds for seconds in rollout(run, each, rates, slow)]
            for each, slow in zip(run.played, slower, strict=True)
        ]
        published = pinned(rollouts, training, staleness, side_by_side)
    return (published[-1] - published[FIRST - 1]) / (len(published) - FIRST)


_MODEL = 14e9
_FLOPS, _BANDWIDTH, _USED, _MFU = 989e12, 3.35e12, 0.6, 0.4
_TP = 2
"""GPUs of an engine."""
_PROMPTS, _GROUP_SIZE = 512, 8
_SHARES = (0.25, 0.5, 0.75)
"""Of the GPUs, that play where engines and learner have their own."""


def scale(quick: bool) -> Iterator[Row]:
    """A row for each number of GPUs."""
    drawn = random.Random(1)
    iterations = 6 if quick else 24
    lengths = [
        [
            [min(16384, drawn.lognormvariate(math.log(1500), 0.8)) for _ in range(_GROUP_SIZE)]
            for _ in range(_PROMPTS)
        ]
        for _ in range(iterations)
    ]
    for gpus in (2, 16, 128, 1024) if quick else [2**n for n in range(1, 11)]:
        whole = _seconds(lengths, gpus, gpus, 0, side_by_side=False)
        divided = {
            s: min(
                _seconds(lengths, played, gpus - played, s, side_by_side=True)
                for played in {max(_TP, round(gpus * share / _TP) * _TP) for share in _SHARES}
                if played < gpus
            )
            if gpus > _TP
            else None
            for s in (1, 2)
        }
        row: Row = {"run": f"{gpus:,} GPUs", "schedule": "synchronous", "predicted": whole}
        for s, seconds in divided.items():
            row[f"pinned {s}, separate"] = whole / seconds if seconds else None
        for s in (1, 2, 4):
            seconds = _seconds(lengths, gpus, gpus, s, side_by_side=False, stream=True)
            row[f"stream {s}, colocated"] = whole / seconds
        yield row


def _seconds(
    lengths: Sequence[Sequence[Sequence[float]]],
    playing: int,
    learning: int,
    staleness: int,
    side_by_side: bool,
    stream: bool = False,
) -> float:
    """Seconds of an iteration, the first and the last included. playing, learning: GPUs."""
    step = 2 * _MODEL / (_TP * _BANDWIDTH * _USED)
    compute = 2 * _MODEL / (_TP * _FLOPS * _MFU)
    speed = Speed(compute / step, 256)
    engines = playing // _TP
    rate = 6 * _MODEL / (learning * _FLOPS * _MFU)
    training = [rate * sum(map(sum, each)) for each in lengths]
    work = [[[step * tokens for tokens in group] for group in each] for each in lengths]
    if stream:
        groups = [*itertools.chain(*work)]
        made = [Engine(speed) for _ in range(engines)]
        published = Stream(groups, training, staleness, side_by_side, 256, made).run()
    else:
        rollouts = [
            [
                play([*itertools.chain(*(each[n] for n in part))], speed)
                for part in contiguous(range(len(each)), engines)
            ]
            for each in work
        ]
        published = pinned(rollouts, training, staleness, side_by_side)
    return published[-1] / len(published)


_OWN = {
    "synchronous": (),
    "pinned-1": ("schedule.staleness=1", "stages.placement=shared"),
    "stream-1": ("schedule.staleness=1", "schedule.mode=stream"),
    "stream-2": ("schedule.staleness=2", "schedule.mode=stream"),
}
"""Runs of its own, by what they add to the first."""


def own_runs(scratch: Path, quick: bool) -> list[Path]:
    """Make the runs of `_OWN`: long-tailed episodes on the torch engine."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name, settings in _OWN.items():
        common = [
            f"name={name}",
            f"runs_directory={scratch / 'runs'}",
            f"model.path={scratch / 'model'}",
            f"iterations={FIRST + (4 if quick else 8)}",
            "environment={name: benchmarks.asynchronous:LongTail}",
            "algorithm.importance_correction={}",
            "rollout.prompts_per_iteration=8",
            "rollout.max_running_requests=64",
            "rollout.max_turns=100",
            "rollout.max_tokens_per_turn=16",
            "rollout.threads=1",
            "update.threads=1",
            "evaluation.every=0",
            "tracking.enabled=false",
        ]
        environment = {"PYTHONPATH": str(REPOSITORY)}
        train(
            "tictactoe_tiny",
            [*common, *settings],
            scratch,
            log=f"{name}.log",
            environment=environment,
        )
    return [scratch / "runs" / name for name in _OWN]


def main() -> None:
    options = _options()
    report = Report("schedule_model", "Seconds of an iteration, predicted from lengths and rates")
    with tempfile.TemporaryDirectory(prefix="earl-schedule-model-") as name:
        paths = options.runs or own_runs((options.keep or Path(name)).resolve(), options.quick)
        runs = [read_run(path) for path in paths]
    rates = {run.kind: fit(run) for run in runs if not run.staleness}
    errors, alone = [], []
    for run in runs:
        found = rates.get(run.kind)
        if found is None:
            report.notes.append(f"{run.name} is not predicted: no synchronous run is of its kind")
            continue
        row: Row = {"run": run.name, "schedule": run.schedule, "seconds": run.seconds}
        row["predicted"] = predict(run, found, by_machine=True)
        row["error"] = abs(row["predicted"] / run.seconds - 1)
        row["by rates alone"] = predict(run, found, by_machine=False)
        errors.append(row["error"])
        alone.append(abs(row["by rates alone"] / run.seconds - 1))
        report.rows.append(row)
    report.rows += scale(options.quick)
    if errors:
        report.headline["schedule_model_error"] = max(errors)
        report.headline["error_by_rates_alone"] = max(alone)
    report.notes += [
        "`predicted` takes the update's seconds for a token from each iteration of the run itself, "
        "and the engine's as much above its rate, because the machine was not equally fast in all "
        "runs; `by rates alone` takes all from the synchronous run. schedule_model_error is the "
        "greatest error of `predicted`, that of the synchronous runs included.",
        f"GPUs: a model of {_MODEL / 1e9:.0f}e9 parameters on H100s by data sheet ({_USED:.0%} of "
        f"the bandwidth, {_MFU:.0%} of the operations), {_TP} GPUs an engine, {_PROMPTS} prompts "
        f"of {_GROUP_SIZE} episodes an iteration whatever their number, log-normal lengths (median "
        "1,500 tokens, spread 0.8). Columns are speeds over the synchronous schedule; under "
        "`separate` the better of a quarter, a half and three quarters of the GPUs play. Loading "
        "weights and collectives cost nothing there.",
    ]
    publish(report, options)


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("runs", nargs="*", type=Path, help="directories of runs")
    made.add_argument("--keep", type=Path, help="leave the runs of its own in this directory")
    return made.parse_args()


if __name__ == "__main__":
    main()

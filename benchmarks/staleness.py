"""Learning from stale episodes: wins of a small model, by staleness, mode and correction.

    python -m benchmarks.staleness --scratch DIRECTORY --svg FILE --markdown FILE

`tictactoe_tiny` learns with rollouts that are 0, 1, 2 or 4 versions old, with a stream of groups
that are at most 2 old, and with rollouts that are 4 old and whose importance weights are held at 1:
the warning example. Engine and learner share the two cores (`shared`), the stream takes turns.
Every arm plays the same held-out games of each seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.distillation import RECIPE, earl, settings
from earl_core.run.checkpoints import evaluated
from earl_core.run.record import read_lines
from tasks.reports.chart import Curve, chart
from tools.harness import Report, Row, parser, publish

_WINS = "outcome/win/share"
_GOAL = 0.6
_SHARED = ("stages.placement=shared", "algorithm.importance_correction={}")
ARMS: dict[str, Sequence[str]] = {
    "0": (),
    **{str(s): (f"schedule.staleness={s}", *_SHARED) for s in (1, 2, 4)},
    "stream 2": (
        "schedule={staleness: 2, mode: stream}",
        "algorithm.importance_correction={}",
    ),
    "4, uncorrected": (
        "schedule.staleness=4",
        "stages.placement=shared",
        "algorithm.importance_correction={low: 0.999999, cap: 1}",
    ),
}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--iterations", type=int, default=40)
    made.add_argument("--every", type=int, default=5, help="iterations between evaluations")
    made.add_argument("--episodes", type=int, default=512, help="held-out games of an evaluation")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--prompts", type=int, default=32, help="of an iteration, 8 games each")
    made.add_argument("--learning-rate", type=float, default=3e-4)
    made.add_argument("--svg", type=Path, help="draw the mean curves into this file")
    options = made.parse_args()
    if options.quick:
        options.seeds, options.iterations, options.episodes = 1, 10, 64
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="earl-staleness-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    found = {
        (arm, seed): trained(arm, seed, scratch, options)
        for seed in range(options.seeds)
        for arm in options.arms
    }
    report = Report("staleness", "Wins while episodes are older than the policy")
    curves = []
    for arm in options.arms:
        runs = [found[arm, seed] for seed in range(options.seeds)]
        points = mean([curve(run) for run in runs])
        curves.append(Curve(arm, [(x, 100 * y) for x, y in points]))
        report.rows.append(_row(arm, runs))
    to_goal = {row["staleness"]: row["iterations to 60 %"] for row in report.rows}
    if to_goal.get("0") and to_goal.get("1"):
        report.headline["stale_1_iterations_share"] = float(to_goal["1"]) / float(to_goal["0"])
    report.notes += [
        f"{options.seeds} seeds; {options.episodes} held-out games every {options.every} "
        f"iterations of {8 * options.prompts} episodes at a learning rate of "
        f"{options.learning_rate:g}. Iterations to 60 %: on the mean curve, between two "
        "evaluations by a straight line.",
        "`4, uncorrected` has importance weights between 0.999999 and 1, which is no correction.",
        "Seconds are of the iterations without their evaluations, on two cores that other programs "
        "used, too: they do not compare the modes (benchmarks/asynchronous.py does).",
    ]
    if options.svg:
        title = "Wins in held-out games, by staleness (mean of the seeds)"
        options.svg.write_text(chart(title, "%", curves, within=(0, 80)))
    publish(report, options)


def trained(arm: str, seed: int, scratch: Path, options: Any) -> Path:
    """Train one arm with one seed, or go on with it; its run directory."""
    name = f"staleness_{arm.replace(', ', '_').replace(' ', '_')}_seed_{seed}"
    wanted = [
        f"rollout.prompts_per_iteration={options.prompts}",
        f"update.learning_rate={options.learning_rate}",
        *ARMS[arm],
    ]
    return with_seed(name, seed, scratch, options, wanted)


def with_seed(name: str, seed: int, scratch: Path, options: Any, wanted: Sequence[str]) -> Path:
    """Train the recipe with a model of the seed, or go on with it; the run's directory. wanted:
    further overrides."""
    common = [
        f"seed={seed}",
        f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / f'model_{seed}'}",
        f"model.builder_options={{seed: {seed}}}",
        f"iterations={options.iterations}",
        f"evaluation.every={options.every}",
        f"evaluation.episodes={options.episodes}",
    ]
    earl("train", RECIPE, "--name", name, "--quiet", *settings([*common, *wanted]))
    return scratch / "runs" / name


def curve(run: Path) -> list[tuple[float, float]]:
    return [(float(each.iteration), each.metrics.get(_WINS, 0.0)) for each in evaluated(run)]


def mean(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [
        (points[0][0], sum(y for _, y in points) / len(points))
        for points in zip(*curves, strict=True)
    ]


def _row(arm: str, runs: Sequence[Path]) -> Row:
    points = mean([curve(run) for run in runs])
    lines = [line for run in runs for line in read_lines(run / "metrics.jsonl")]
    last = [100 * curve(run)[-1][1] for run in runs]
    return {
        "staleness": arm,
        **{f"wins after {x:.0f} %": 100 * y for x, y in points if x % 10 == 0},
        "last of each seed %": ", ".join(f"{each:.0f}" for each in last),
        "iterations to 60 %": _reached(points),
        "mean age": sum(line["update/age_mean"] for line in lines) / len(lines),
        "s/iteration": sum(
            line.get(f"{stage}/stage_seconds", 0.0) for line in lines for stage in _STAGES
        )
        / len(lines),
    }


_STAGES = ("rollout", "collect", "update")


def _reached(points: Sequence[tuple[float, float]]) -> float | None:
    """Iterations after which the curve first has the wanted share; none where it never has."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= _GOAL:
            return x0 if y0 >= _GOAL else x0 + (x1 - x0) * (_GOAL - y0) / (y1 - y0)
    return None


if __name__ == "__main__":
    main()

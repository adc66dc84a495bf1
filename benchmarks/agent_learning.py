"""An agent that is trained as it is learns as the built-in loop does: wins of a small model.

    python -m benchmarks.agent_learning --python VENV/bin/python --scratch DIRECTORY --markdown FILE

`tictactoe_tiny` learns from the built-in game, and from a LangGraph agent (`langgraph_player`) that
plays the same game by OpenAI's API, in an interpreter of its own that has `langgraph` and
`langchain-openai`. Each arm is evaluated in held-out games as it is trained: with several seeds,
the spread of the seeds is compared.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.distillation import RECIPE
from benchmarks.staleness import curve, mean, with_seed
from earl_core.config import load_config
from earl_core.run.checkpoints import evaluated
from earl_core.run.record import read_lines
from tasks.reports.chart import Curve, chart
from tools.harness import Report, Row, parser, publish

ARMS = ("built-in", "agent")


def main() -> None:
    options = _options()
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="earl-agents-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Path]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for arm in ARMS:
            runs[arm].append(trained(arm, seed, scratch, options))
    report = Report("agent_learning", "Wins of an agent that is trained as it is")
    curves = []
    for arm in ARMS:
        points = mean([curve(run) for run in runs[arm]])
        curves.append(Curve(arm, [(x, 100 * y) for x, y in points]))
        report.rows.append(_row(arm, runs[arm], points))
    built_in, agent = ([curve(run)[-1][1] for run in runs[arm]] for arm in ARMS)
    report.headline["agent_wins_share"] = sum(agent) / sum(built_in)
    (low, high), (its_low, its_high) = (_interval(runs[arm]) for arm in ARMS)
    report.headline["intervals_overlap"] = float(max(low, its_low) <= min(high, its_high))
    report.notes += [
        f"{options.seeds} seeds; {options.episodes} held-out games every {options.every} of "
        f"{options.iterations} iterations. agent_wins_share is the agents' mean last share of wins "
        "over the built-in loop's; an arm's interval has the 95 % intervals of all of its seeds.",
        f"agent: {_versions(options.python)}.",
    ]
    if options.svg:
        title = "Wins in held-out games (mean of the seeds)"
        options.svg.write_text(chart(title, "%", curves, within=(0, 80)))
    publish(report, options)


def trained(arm: str, seed: int, scratch: Path, options: Any) -> Path:
    """Train one arm with one seed, or go on with it; its run directory."""
    played = {
        "agent": "benchmarks.langgraph_player:play",
        "python": str(options.python),
        "options": {"game": load_config(RECIPE).environment.options},
    }
    wanted = [f"environment={json.dumps(played)}"] if arm == "agent" else []
    return with_seed(f"{arm}_seed_{seed}", seed, scratch, options, wanted)


def _row(arm: str, runs: list[Path], points: list[tuple[float, float]]) -> Row:
    lines = [line for run in runs for line in read_lines(run / "metrics.jsonl")]
    last = [100 * curve(run)[-1][1] for run in runs]
    return {
        "": arm,
        **{f"wins after {x:.0f} %": 100 * y for x, y in points},
        "last of each seed %": ", ".join(f"{each:.0f}" for each in last),
        "interval %": "{:.0f} to {:.0f}".format(*(100 * each for each in _interval(runs))),
        "new samples %": 100 * _of(lines, "rollout/new_sample_share"),
        "rollout s": _of(lines, "rollout/stage_seconds"),
    }


def _interval(runs: list[Path]) -> tuple[float, float]:
    last = [evaluated(run)[-1].metrics for run in runs]
    lowest = min(each["outcome/win/low"] for each in last)
    return lowest, max(each["outcome/win/high"] for each in last)


def _of(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


def _versions(python: Path) -> str:
    code = (
        "from importlib.metadata import version as v;"
        "print(', '.join(f'{n} {v(n)}' for n in ('langgraph', 'langchain-openai', 'openai')))"
    )
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def _options() -> Any:
    made = parser(__doc__ or "")
    made.add_argument("--python", type=Path, required=True, help="an interpreter with LangGraph")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--iterations", type=int, default=25)
    made.add_argument("--every", type=int, default=5, help="iterations between evaluations")
    made.add_argument("--episodes", type=int, default=512, help="held-out games of an evaluation")
    made.add_argument("--svg", type=Path, help="draw the mean curves into this file")
    options = made.parse_args()
    if options.quick:
        options.seeds, options.iterations, options.every, options.episodes = 1, 2, 2, 64
    return options


if __name__ == "__main__":
    main()

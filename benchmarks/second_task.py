"""A second task without losing the first: tic-tac-toe, then connect four, with and without anchor.

A small model learns tic-tac-toe. From its last weights it goes on with connect four: once alone,
once with a quarter of its prompts from tic-tac-toe, which earn nothing and cost divergence from the
first policy. Both play the same held-out games of both tasks; `best` is the checkpoint that
`--checkpoint best` takes, with a gate on the first task where there is an anchor.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.distillation import RECIPE, earl, settings
from earl_core.run.checkpoints import evaluated, gated_returns
from tools.harness import Report, Row, parser, publish

_OPTIONS = {
    "style": "compact",
    "opponent": "random",
    "agent_side": "both",
    "illegal_action": "lose",
    "rewards": {"win": 1.0, "draw": 0.3, "loss": -1.0, "illegal": -1.5},
}
_FIRST = {"name": "tic_tac_toe", "options": _OPTIONS}
_SECOND = {"name": "connect_four", "options": _OPTIONS}
_TASKS = ("first", "second")
ARMS = ("alone", "anchor")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--first-iterations", type=int, default=40)
    made.add_argument("--second-iterations", type=int, default=40)
    made.add_argument("--coefficient", type=float, default=0.3, help="of the anchor's KL")
    made.add_argument("--episodes", type=int, default=256, help="held-out games of each task")
    options = made.parse_args()
    if options.quick:
        options.seeds, options.first_iterations, options.second_iterations = 1, 3, 2
        options.episodes = 32
    options.scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="earl-second-"))).resolve()
    options.scratch.mkdir(parents=True, exist_ok=True)
    rows = [
        row for seed in range(options.seeds) for arm in ARMS for row in trained(seed, arm, options)
    ]
    notes = [
        f"{options.second_iterations} iterations of 256 episodes of connect four, in the arm "
        "`anchor` of 192 and 64 of tic-tac-toe; wins against a random opponent, from either side, "
        f"of {options.episodes} held-out games of each task",
        "last: the last weights; best: what --checkpoint best takes, with a gate on tic-tac-toe "
        "in the arm `anchor` alone, and none where no checkpoint passed the gate",
        "the anchor's iterations have a quarter fewer games of the second task, so the arms had "
        "equal iterations and not equal games",
    ]
    headline = {}
    for arm in ARMS:
        last = [row for row in rows if row["arm"] == arm and row["checkpoint"] == "last"]
        for task in _TASKS:
            wins = [float(row[f"{task} task"] or 0) for row in last]
            headline[f"{arm}_{task}_task_wins"] = sum(wins) / len(wins)
    report = Report("second_task", "A second task without losing the first", rows, headline, notes)
    publish(report, options)


def trained(seed: int, arm: str, options: Any) -> list[Row]:
    """Train the first task (once for both arms), then the arm: rows of its beginning, its last
    weights, and its best checkpoint."""
    runs = options.scratch / "runs"
    first, name = f"first_{seed}", f"{arm}_{seed}"
    common = {
        "seed": seed,
        "model.path": str(options.scratch / f"model_{seed}"),
        "model.builder_options": {
            "hidden": 128, "layers": 3, "seed": seed, "characters": "-0123456789XO.|/"
        },
        "runs_directory": str(runs),
        "rollout.max_turns": 21,
        "update.learning_rate": 1e-3,
        "checkpoint.every": 10,
        "checkpoint.keep_last": 100,
    }  # fmt: skip
    alone = {
        "iterations": options.first_iterations,
        "evaluation.every": 0,
    }
    _train(first, {**common, **alone})
    both = zip(_TASKS, (_FIRST, _SECOND), strict=True)
    suites = [{**task, "label": label, "prompts": options.episodes} for label, task in both]
    played: dict[str, Any] = {"environment": _SECOND}
    if arm == "anchor":
        suites[0]["gate"] = True
        kl = {"reference": "initial", "coefficient": options.coefficient}
        played = {
            "algorithm.kl": {"placement": "loss", "estimator": "k2"},
            "environment": None,
            "environments": [
                {**_SECOND, "label": "second", "weight": 3},
                {**_FIRST, "label": "first", "weight": 1, "reward_weight": 0, "kl": kl},
            ],
        }
    second = {
        "model.from": f"{first}@last",
        "iterations": options.second_iterations,
        "evaluation": {"every": 10, "suites": suites},
        **played,
    }
    _train(name, {**common, **second})
    return _rows(runs / name, seed, arm)


def _train(name: str, wanted: dict[str, Any]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in wanted.items()]
    earl("train", RECIPE, "--name", name, "--quiet", *settings(overrides))


def _rows(run: Path, seed: int, arm: str) -> list[Row]:
    evaluations = evaluated(run)
    found = {each.iteration: each.metrics for each in evaluations}
    gates = ["first"] if arm == "anchor" else []
    returns = {n: value for n, value in gated_returns(evaluations, gates).items() if n}
    passed = {n: value for n, value in returns.items() if value is not None}
    best = max(passed, key=lambda n: passed[n]) if passed else None
    chosen = {"beginning": 0, "last": max(found), "best": best}
    return [
        {
            "arm": arm,
            "seed": seed,
            "checkpoint": name,
            "iterations": number,
            **{f"{task} task": _wins(found[number], task) for task in _TASKS},
            **{f"{task} 95 %": _range(found[number], task) for task in _TASKS},
        }
        for name, number in chosen.items()
        if number is not None
    ]


def _wins(metrics: dict[str, float], task: str) -> float:
    return metrics[f"suite/{task}/pass_at_1"]


def _range(metrics: dict[str, float], task: str) -> str:
    low, high = (metrics[f"suite/{task}/pass_at_1/{end}"] for end in ("low", "high"))
    return f"{low:.2f} to {high:.2f}"


if __name__ == "__main__":
    main()

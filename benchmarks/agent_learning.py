"""An agent that knows the policy by its base URL beside the built-in loop: does it learn as well?

Both play the game of `tictactoe_tiny`, from the same initial model, with the same seeds. An agent's
draws are others than the loop's, so their curves are compared as two seeds of one are: by the win
share of held-out games, with 95 % intervals. Runs go on where they ended when the script is started
again in the same directory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import yaml

from earl_core.config import load_config
from earl_core.rollout.rollout_stats import wilson_interval
from tools.harness import REPOSITORY, Report, parser, publish
from tools.learning_curves import evaluations, rows_of

AGENT = "tests.rollout.agents:tic_tac_toe"


def train(directory: Path, side: str, seed: int, options: argparse.Namespace) -> Path:
    """The run directory of a finished training."""
    name = f"{side}-{seed}"
    config = load_config("tictactoe_tiny").model_dump(mode="json", exclude_unset=True)
    if side == "agent":
        config["environment"] = {
            "agent": AGENT,
            "options": {"game": config["environment"]["options"]},
        }
    config |= {"name": name, "seed": seed, "iterations": options.iterations}
    config["evaluation"] = {"every": options.iterations // 2, "episodes": options.episodes}
    config["tracking"] = {"enabled": False}
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "flows.cli", "train", str(file), "--plain"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with (directory / f"{name}.log").open("ab") as log:
        subprocess.run(command, cwd=directory, env=environment, check=True, stdout=log, stderr=log)
    return directory / "runs" / name


def main() -> None:
    made = parser("Learning through the gateway and through the built-in loop.")
    made.add_argument("--directory", type=Path, required=True)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--iterations", type=int, default=20)
    made.add_argument("--episodes", type=int, default=512, help="of an evaluation")
    options = made.parse_args()
    if options.quick:
        options.seeds, options.iterations, options.episodes = 1, 2, 64
    options.directory.mkdir(parents=True, exist_ok=True)
    report = Report("agent_learning", "An agent by its base URL beside the built-in loop")
    wins: dict[str, list[float]] = {"loop": [], "agent": []}
    for seed in range(options.seeds):
        for side, shares in wins.items():
            run = train(options.directory, side, seed, options)
            report.rows += rows_of(run)
            shares.append(evaluations(run)[-1].shares["win"][0])
    for side, shares in wins.items():
        games = options.seeds * options.episodes
        low, high = wilson_interval(round(sum(shares) * options.episodes), games)
        report.headline[f"{side}_win"] = sum(shares) / len(shares)
        report.notes.append(f"{side}: wins of all seeds together, 95 %: {low:.3f} to {high:.3f}")
    report.notes.append(
        f"tictactoe_tiny, {options.iterations} iterations of 256 games; {options.episodes} "
        "held-out games an evaluation."
    )
    publish(report, options)


if __name__ == "__main__":
    main()

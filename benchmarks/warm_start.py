"""Warm start: a random model imitates scripted games, then plays; against playing from nothing.

Both runs are the recipe `tictactoe_tiny` with a model of random weights, not even warmed up on
legal moves. One has first iterations that imitate 2,000 games of a script (it wins where it can,
blocks where it must, and else moves at random); their number is not counted as iterations of
playing. Each stops at the first evaluation with 70 % wins.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earl_core.environments.games.tic_tac_toe import RULES
from earl_core.environments.registry import create
from earl_core.run.checkpoints import evaluated
from tools.harness import REPOSITORY, Report, Row, parser, publish
from tools.process_tree import train_command

RECIPE = "tictactoe_tiny"
WINS = 0.7
GAME = {"style": "compact", "opponent": "random", "agent_side": "both", "illegal_action": "lose"}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--games", type=int, default=2000, help="scripted ones")
    made.add_argument("--imitating", type=int, default=24, help="iterations, of 256 games each")
    made.add_argument("--most", type=int, default=80, help="iterations that play, in each run")
    made.add_argument("--every", type=int, default=4, help="iterations between evaluations")
    options = made.parse_args()
    if options.quick:
        options.seeds = 1
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="earl-warm-start-"))
    scratch = scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    rows = [row for seed in range(options.seeds) for row in measured(seed, scratch, options)]
    legal = min(float(row["legal moves"] or 0) for row in rows if row["run"] == "imitation")
    shares = [float(row["share"] or 0) for row in rows if row["run"] == "imitation"]
    notes = [
        "legal moves: of all moves of the held-out games, before the first iteration that plays; "
        f"wins: of {EPISODES} held-out games against a random opponent, from either side",
        f"iterations: those that played until an evaluation had {WINS:.0%} wins, or {options.most} "
        "where none had",
        "imitation_legal is the worst seed's, warm_start_iterations_share the worst seed's",
    ]
    headline = {"imitation_legal": legal, "warm_start_iterations_share": max(shares)}
    publish(Report("warm_start", "Warm start from scripted games", rows, headline, notes), options)


EPISODES = 256


def measured(seed: int, scratch: Path, options: argparse.Namespace) -> list[Row]:
    """Both runs of a seed."""
    games = scratch / f"games_{seed}.jsonl"
    if not games.exists():
        games.write_text("".join(json.dumps(each) + "\n" for each in script(options.games, seed)))
    common = [
        f"seed={seed}",
        f"runs_directory={scratch / 'runs'}",
        f"model.path={scratch / f'model_{seed}'}",
        f"model.builder_options={{hidden: 128, layers: 3, warm_start_steps: 0, seed: {seed}}}",
        f"evaluation={{every: {options.every}, episodes: {EPISODES}}}",
        "update.learning_rate=5e-4",
        "update.minibatches=4",
    ]
    told = {
        "data": str(games),
        "iterations": options.imitating,
        "minibatches": 16,
        "learning_rate": 2e-3,
    }
    first = options.imitating
    warm = [*common, f"imitation={json.dumps(told)}", f"iterations={first + options.most}"]
    cold = [*common, f"iterations={options.most}"]
    begun, taken = trained(scratch / "runs" / f"warm_{seed}", warm, first)
    nothing, alone = trained(scratch / "runs" / f"cold_{seed}", cold, 0)
    return [
        {"run": "imitation", "seed": seed, **begun, "iterations": taken, "share": taken / alone},
        {"run": "from nothing", "seed": seed, **nothing, "iterations": alone, "share": 1.0},
    ]


def trained(run: Path, overrides: list[str], first: int) -> tuple[Row, int]:
    """Train until an evaluation after iteration `first` has enough wins; what the evaluation at
    `first` said, and the iterations that it took from there."""
    command = train_command(RECIPE, [f"name={run.name}", *overrides], "--json")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    if not reached(run, first):
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["kind"] == "evaluation" and reached(run, first):
                    process.send_signal(signal.SIGTERM)
                    break
        if process.returncode and not reached(run, first):
            raise SystemExit(f"{run.name} ended with {process.returncode}")
    found = wins(run, first)
    begun = next(each.metrics for each in evaluated(run) if each.iteration == first)
    return {"legal moves": legal_share(begun), "wins before": found[first]}, max(found) - first


def wins(run: Path, first: int) -> dict[int, float]:
    """The share of wins by the iterations before each evaluation, those that imitate included."""
    return {
        each.iteration: each.metrics.get("outcome/win/share", 0.0)
        for each in evaluated(run)
        if each.iteration >= first
    }


def reached(run: Path, first: int) -> bool:
    found = wins(run, first)
    if found:
        last = max(found)
        print(f"{run.name}: {last} iterations, {found[last]:.1%} wins", file=sys.stderr, flush=True)
    return any(share >= WINS for share in found.values())


def legal_share(metrics: dict[str, Any]) -> float:
    """The share of all moves that were legal; an illegal one ends its game."""
    moves, illegal = (
        float(metrics[f"environment/{name}"]) for name in ("agent_moves", "illegal_answers")
    )
    return moves / (moves + illegal)


def script(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Chats of scripted games against the random opponent, from either side."""
    for number in range(count):
        chooser = random.Random(f"script/{seed}/{number}")
        game = create("tic_tac_toe", GAME)
        heard = game.reset(number, seed)
        messages: list[dict[str, Any]] = []
        while True:
            messages += map(dict, heard)
            said = move_of(str(heard[-1]["content"]), chooser)
            messages.append({"role": "assistant", "content": said})
            result = game.step(said)
            if result.done:
                break
            heard = result.messages
        game.close()
        yield {"messages": messages}


def move_of(board: str, chooser: random.Random) -> str:
    """The script's answer to a board."""
    state = "".join(each if each in "XO" else "." for each in board.replace("|", ""))
    own = RULES.to_move(state)
    moves = (
        RULES.winning_moves(state, own) or RULES.winning_moves(state, 1 - own) or RULES.moves(state)
    )
    return str(chooser.choice(moves) + 1)


if __name__ == "__main__":
    main()

"""Whole iterations on EARL and on TRL: same model, game, number of games and update.

Both sides play tic-tac-toe with the same model in groups of the same size, train on every game once
with GRPO over full-precision weights, and take one optimizer step, in the same precision: that of
the run file, which for `auto` is what this machine computes fast. EARL runs as `earl train` does;
TRL runs `GRPOTrainer` with the `rollout_func` of `benchmarks.trl_rollout`, in an environment of its
own, with the fastest of the settings tried here. Rounds alternate.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.iteration_sides import Iteration, Round, run_earl, run_trl, settings_of
from earl_core.config import RunConfig
from tools.harness import Report, Row, config_here, interval, median, parser, publish
from tools.process_tree import CommandFailed

Settings = dict[str, int | bool]

_BASE: Settings = {
    "device_batch": 8,
    "bf16_copy": True,
    "cache": True,
    "gradient_checkpointing": False,
    "use_vllm": False,
}
_FASTEST: Settings = {**_BASE, "bf16_copy": False}
"""The fastest settings of the last search, which was made on two cores."""

TRL_CANDIDATES: tuple[Settings, ...] = (
    _BASE,
    {**_BASE, "device_batch": 16},
    {**_BASE, "device_batch": 32},
    {**_BASE, "cache": False},
    {**_BASE, "bf16_copy": False},
    {**_BASE, "gradient_checkpointing": True},
    {**_BASE, "use_vllm": True},
)
"""device_batch: games in a forward and backward pass. bf16_copy: games are played by a bfloat16
copy of the model instead of the full-precision one under autocast. cache: keys and values are kept
across turns. gradient_checkpointing: TRL's own default is on. use_vllm: TRL's colocated vLLM."""

_TRY_SECONDS = 900.0


@dataclass
class Measured:
    """All of one side's iterations that count."""

    iterations: list[Iteration]
    peak_bytes: int

    @classmethod
    def of(cls, rounds: list[Round]) -> Measured:
        """Every round's iterations but its first, which warms up."""
        kept = [item for found in rounds for item in found.iterations if item.number > 0]
        return cls(kept, max(found.peak_bytes for found in rounds))

    @property
    def seconds(self) -> float:
        """Median seconds of an iteration."""
        return median([item.seconds for item in self.iterations])

    @property
    def seconds_per_token(self) -> float:
        """Median seconds for each token of the games."""
        return median([item.seconds / item.tokens for item in self.iterations])

    def row(self, side: str, precision: str) -> Row:
        """Its row of the table."""
        row: Row = {
            "side": side,
            "precision": precision,
            "s/iteration": self.seconds,
            "range": interval([item.seconds for item in self.iterations]),
            "games": median([item.games for item in self.iterations]),
            "tokens": median([item.tokens for item in self.iterations]),
            "ms/token": 1000 * self.seconds_per_token,
        }
        for stage in ("rollout", "update", "rest"):
            row[f"{stage} s"] = median([item.stages[stage] for item in self.iterations])
        row["peak GiB"] = self.peak_bytes / 2**30
        row["return"] = median([item.mean_return for item in self.iterations])
        return row


def trl_candidates(precision: str) -> list[Settings]:
    """Candidates that compute in this precision: in float32 nothing plays by a bfloat16 copy."""
    if precision == "bf16":
        return list(TRL_CANDIDATES)
    alike = [{**each, "bf16_copy": False} for each in TRL_CANDIDATES]
    return [each for number, each in enumerate(alike) if each not in alike[:number]]


def pick_trl_settings(config: RunConfig, scratch: Path, report: Report) -> Settings:
    """Try every candidate for two iterations; the one whose second was the fastest. Each gets a
    row, or a note where it failed."""
    tried: list[tuple[float, int]] = []
    candidates = trl_candidates(config.update.precision)
    for number, candidate in enumerate(candidates):
        try:
            found = run_trl(config, candidate, 2, scratch / f"trl-try-{number}", _TRY_SECONDS)
        except CommandFailed as failure:
            report.notes.append(
                f"TRL with {_words(candidate)} failed on this machine: {failure.reason}"
            )
            continue
        measured = Measured.of([found])
        tried.append((measured.seconds_per_token, number))
        title = f"TRL, tried: {_words(candidate)}"
        report.rows.append(measured.row(title, config.update.precision))
    if not tried:
        raise CommandFailed("TRL failed with every setting:\n" + "\n".join(report.notes))
    return candidates[min(tried)[1]]


def fill(
    report: Report, earl: Measured, trl: Measured, chosen: Settings, config: RunConfig
) -> None:
    """The two sides' rows first, then what they amount to."""
    precision = config.update.precision
    ratio = trl.seconds_per_token / earl.seconds_per_token
    ours = earl.row("EARL", precision)
    theirs = trl.row(f"TRL, best: {_words(chosen)}", precision)
    ours["EARL's speed over it"] = 1.0
    theirs["EARL's speed over it"] = ratio
    ideal: Row = {
        "side": "limit: EARL's rollout and update bodies alone",
        "s/iteration": median([item.seconds - item.stages["rest"] for item in earl.iterations]),
        "EARL's speed over it": median(
            [(item.seconds - item.stages["rest"]) / item.seconds for item in earl.iterations]
        ),
    }
    report.rows[:0] = [ours, theirs, ideal]
    report.headline["iteration_speedup_vs_trl"] = ratio
    report.headline["update_in_run_over_alone"] = median(
        [item.update_over_alone for item in earl.iterations]
    )
    report.headline["peak_memory_of_trl_over_earl"] = trl.peak_bytes / earl.peak_bytes
    report.notes += [
        "Speedup at equal tokens: seconds per token of the games (prompts, observations and "
        "answers), TRL's over EARL's; medians over iterations, the first of each round left out.",
        "Update: scoring where needed, forward, backward, optimizer step; for TRL everything "
        "outside of its rollout_func, advantages included. Rest: EARL's other stages, publishing "
        "the weights to the engine, checkpoints as configured, tracking and Prefect.",
        "update_in_run_over_alone: the update of a run against the second update of a fresh "
        "process with the same samples and packs.",
        "Peak: proportional set size of all processes, EARL's with Prefect's server, MLflow and "
        "vLLM's processes.",
    ]


def main() -> None:
    options = _options()
    config = config_here(options.config, settings_of(options.games, options.group_size))
    report = Report("iteration", "Whole iterations: EARL and TRL")
    with tempfile.TemporaryDirectory(prefix="earl-iteration-") as name:
        scratch = Path(name)
        chosen = pick_trl_settings(config, scratch, report) if options.tune else _FASTEST
        earl, trl = [], []
        for number in range(options.rounds):
            earl.append(
                run_earl(options.config, config, options.iterations, scratch / f"earl-{number}")
            )
            trl.append(run_trl(config, chosen, options.iterations, scratch / f"trl-{number}"))
        fill(report, Measured.of(earl), Measured.of(trl), chosen, config)
    report.notes.insert(
        0,
        f"{options.config}, model {config.model.path}, {options.games} games in groups of "
        f"{options.group_size}, {options.rounds} rounds of {options.iterations} iterations; both "
        f"sides in {config.update.precision}, EARL's engine in {config.rollout.dtype}.",
    )
    if options.quick:
        report.notes.append(
            "--quick: few games and one round, TRL's settings not searched and its vLLM mode not "
            "tried; a rough number."
        )
    publish(report, options)


def _words(candidate: Settings) -> str:
    return ", ".join(
        f"{name} {value}" if not isinstance(value, bool) else name if value else f"no {name}"
        for name, value in candidate.items()
    ).replace("_", " ")


def _options() -> argparse.Namespace:
    made = parser("Seconds per iteration and peak memory on EARL and on TRL.")
    made.add_argument("--config", type=Path, default=Path("earl_core/recipes/demo.yaml"))
    made.add_argument("--games", type=int, help="games per iteration; default 64, quick 8")
    made.add_argument("--group-size", type=int, default=8)
    made.add_argument("--iterations", type=int, help="per round; default 4, quick 2")
    made.add_argument("--rounds", type=int, help="default 2, quick 1")
    made.add_argument(
        "--tune",
        action=argparse.BooleanOptionalAction,
        help="search TRL's settings, its vLLM mode included; quick does not",
    )
    options = made.parse_args()
    quick = options.quick
    options.games = options.games or (8 if quick else 64)
    options.iterations = options.iterations or (2 if quick else 4)
    options.rounds = options.rounds or (1 if quick else 2)
    options.tune = not quick if options.tune is None else options.tune
    if options.games % options.group_size or options.iterations < 2:
        made.error("--games must be a multiple of --group-size, and --iterations at least 2")
    return options


if __name__ == "__main__":
    main()

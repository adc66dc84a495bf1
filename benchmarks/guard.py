"""Runs that are poisoned or collapse, with a guard that only warns and with one that acts.

    python -m benchmarks.guard --scratch DIRECTORY --markdown benchmarks/results/guard.md

A small model learns tic-tac-toe. After some iterations the environment's rewards are changed behind
EARL's back (`benchmarks.guard_threats`), or the run goes on with a learning rate under which it
collapses: answers become illegal, the game asks again, contexts grow to their limit and the return
falls. Both arms have the same seeds. Wins are of held-out games without any threat, of the last
checkpoint. Clean runs of four kinds count the warnings that nobody should see.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.distillation import RECIPE, settings
from earl_core.dispatch import read_manifest
from earl_core.guard.decision import decision_of
from earl_core.run.record import read_lines, read_record
from tools.harness import REPOSITORY, Report, Row, parser, publish


@dataclass(frozen=True)
class Threat:
    """name, share: as `benchmarks.guard_threats` has them; no name: it is none of rewards.
    from_first: whether it is there before the run begins. overrides: of the whole run; later: of
    the iterations from the threat on."""

    name: str = ""
    share: float = 1.0
    from_first: bool = False
    overrides: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


_ASKS_AGAIN = (
    "environment.options.game.illegal_action=retry",
    "environment.options.game.max_retries=40",
    "rollout.max_turns=40",
    "rollout.max_tokens_per_episode=60",
)
_TOO_FAST = ("update.learning_rate=1e-2",)

THREATS = {
    "5 % of rewards flipped": Threat("flipped", 0.05),
    "20 % of rewards flipped": Threat("flipped", 0.2),
    "the environment pays nothing": Threat("pays nothing"),
    "5 % of rewards NaN": Threat("nan", 0.05),
    "5 % of rewards infinite": Threat("infinite", 0.05),
    "5 % of rewards 1e30": Threat("huge", 0.05),
    "planted prompts, from iteration k": Threat("planted"),
    "planted prompts, from the first": Threat("planted", from_first=True),
    "collapse under a length limit": Threat(overrides=_ASKS_AGAIN, later=_TOO_FAST),
}

_ENVIRONMENT = (
    "environment.name=benchmarks.guard_threats:Threatened",
    "environment.options={switch: threat.json, game: {style: compact, opponent: random, "
    "agent_side: both, illegal_action: lose, rewards: {win: 1.0, draw: 0.3, loss: -1.0, "
    "illegal: -1.5}}}",
)

CLEAN = {
    "grpo": (),
    "one version stale": (
        "schedule.staleness=1",
        "stages.placement=shared",
        "algorithm.importance_correction={}",
    ),
    "a stream": (
        "schedule={staleness: 2, mode: stream}",
        "algorithm.importance_correction={}",
    ),
    "credit by turns, KL in the loss": (
        "algorithm.advantage=reinforce_plus_plus",
        "algorithm.kl={placement: loss, estimator: k3, coefficient: 0.01}",
    ),
}

GUARDS = ("warn", "act")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--scratch", type=Path, help="directory of the runs, which are continued")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--first-seed", type=int, default=0)
    made.add_argument("--at-once", type=int, default=1, help="runs at one time")
    made.add_argument("--clean-seeds", type=int, default=5)
    made.add_argument("--iterations", type=int, default=30)
    made.add_argument("--begins", type=int, default=12, help="iteration that meets the threat")
    made.add_argument("--prompts", type=int, default=16, help="of an iteration, 8 games each")
    made.add_argument("--episodes", type=int, default=512, help="held-out games of each end")
    made.add_argument("--threats", nargs="+", choices=THREATS, default=list(THREATS))
    made.add_argument("--guards", nargs="+", choices=GUARDS, default=list(GUARDS))
    options = made.parse_args()
    if options.quick:
        options.seeds, options.clean_seeds, options.iterations = 1, 1, 8
        options.begins, options.prompts, options.episodes = 5, 8, 64
    options.scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="earl-guard-"))).resolve()
    options.scratch.mkdir(parents=True, exist_ok=True)
    report = Report("guard", "Poisoned and collapsing runs, with a guard and without")
    with ThreadPoolExecutor(options.at_once) as at_once:
        _fill(report, at_once, options)
    report.notes += _notes(options)
    publish(report, options)


def _fill(report: Report, at_once: ThreadPoolExecutor, options: Any) -> None:
    """Give the report its rows and its two numbers."""
    seeds, clean_seeds = (
        range(options.first_seed, options.first_seed + number)
        for number in (options.seeds, options.clean_seeds)
    )
    clean = {
        kind: [at_once.submit(_clean, kind, seed, options) for seed in clean_seeds]
        for kind in CLEAN
    }
    arms: dict[tuple[str, str], list[Future[_End]]] = {
        each: [] for each in itertools.product(options.threats, options.guards)
    }
    # Should somebody stop it, the seeds that are done are whole.
    for seed, (threat, guard) in itertools.product(seeds, arms):
        run = at_once.submit(_threatened, threat, guard, seed, options)
        arms[threat, guard].append(run)
    delays: dict[str, list[float]] = {}
    for (threat, guard), runs in arms.items():
        ends = [run.result() for run in runs]
        report.rows.append(_row(threat, guard, ends))
        delays.setdefault(threat, []).extend(end.delay for end in ends)
    alarms = 0
    for kind, runs in clean.items() if clean_seeds else ():
        ends = [run.result() for run in runs]
        report.rows.append(_row(f"none: {kind}", "warn", ends))
        alarms += sum(end.early for end in ends)
    report.headline["guard_false_alarms"] = float(alarms)
    if (found := delays.get("20 % of rewards flipped")) is not None:
        report.headline["guard_delay"] = max(found)


@dataclass(frozen=True)
class _End:
    """A run's end. early: findings before the threat. delay: iterations from the threat's first one
    to that of the first finding, 1 for the same; infinite without a finding. kinds: of findings.
    wins: percent of held-out games. returns: how often the run went back. said: why it stopped."""

    early: int
    delay: float
    kinds: tuple[str, ...]
    wins: float
    returns: int
    said: str


def _common(seed: int, options: Any) -> list[str]:
    return [
        f"seed={seed}",
        f"runs_directory={options.scratch / 'runs'}",
        f"model.path={options.scratch / f'model_{seed}'}",
        f"model.builder_options={{seed: {seed}}}",
        f"rollout.prompts_per_iteration={options.prompts}",
        "checkpoint.every=1",
        "checkpoint.keep_last=4",
        "evaluation.every=0",
        "tracking.enabled=false",
    ]


def _threatened(title: str, guard: str, seed: int, options: Any) -> _End:
    """Bring the threat about, and go on with it after the iterations before it."""
    threat = THREATS[title]
    name = f"{_plain(title)}_{guard}_{seed}"
    run, place = options.scratch / "runs" / name, options.scratch / name
    begins = 0 if threat.from_first else options.begins
    wanted = [f"iterations={options.iterations}", f"guard={guard}", *threat.later]
    # Where the environment looks for the threat.
    place.mkdir(exist_ok=True)
    if threat.name:
        told = json.dumps({"name": threat.name, "share": threat.share})
        (place / "threat.json").write_text(told)
    code, said = 0, ""
    if (run / "config.yaml").is_file():
        if not _finished(run, options.iterations):
            code, said = _earl("resume", run, "--quiet", place=place, may_fail=True)
    elif threat.from_first:
        own = [*_common(seed, options), *_ENVIRONMENT, *wanted]
        made = ("train", RECIPE, "--name", name, "--quiet", *settings(own))
        code, said = _earl(*made, place=place, may_fail=True)
    else:
        before = _before(threat, seed, options)
        made = ("fork", f"{before}@{begins - 1}", name, "--quiet", *settings(wanted))
        code, said = _earl(*made, place=place, may_fail=True)
    return _end(run, begins, said if code else "", options)


_making = threading.Lock()


def _before(threat: Threat, seed: int, options: Any) -> Path:
    """The run until the threat, of all arms with these overrides and this seed."""
    name = f"before_{'retry' if threat.overrides else 'plain'}_{seed}"
    run: Path = options.scratch / "runs" / name
    wanted = [*_common(seed, options), *_ENVIRONMENT, *threat.overrides]
    wanted += [f"iterations={options.begins}"]
    with _making:
        if not _finished(run, options.begins):
            place = options.scratch / "before"
            place.mkdir(exist_ok=True)
            made = ("train", RECIPE, "--name", name, "--quiet", *settings(wanted))
            _earl(*made, place=place)
    return run


def _plain(title: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in title)


def _clean(kind: str, seed: int, options: Any) -> _End:
    name = f"clean_{_plain(kind)}_{seed}"
    run = options.scratch / "runs" / name
    if not _finished(run, options.iterations):
        wanted = [*_common(seed, options), *CLEAN[kind], f"iterations={options.iterations}"]
        _earl("train", RECIPE, "--name", name, "--quiet", *settings(wanted))
    return _end(run, options.iterations, "", options)


def _finished(run: Path, iterations: int) -> bool:
    """Tell whether the run has these iterations; one that its guard stopped never has."""
    return len(read_lines(run / "metrics.jsonl")) >= iterations


def _earl(*arguments: object, place: Path = REPOSITORY, may_fail: bool = False) -> tuple[int, str]:
    """Run a command of EARL in a directory; its exit code, and what it printed, or its error."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    if done.returncode and not may_fail:
        raise SystemExit(f"earl {arguments[0]} ended with {done.returncode}: {done.stderr}")
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()


def _end(run: Path, begins: int, said: str, options: Any) -> _End:
    sealed = [*run.glob("iterations/*/advantage.json")]
    sealed += run.glob("set_aside/*/iterations/*/advantage.json")
    findings = [
        (manifest.iteration, found.kind)
        for manifest in map(read_manifest, sealed)
        for found in decision_of(manifest).findings
    ]
    first = min((iteration for iteration, _ in findings if iteration >= begins), default=math.inf)
    return _End(
        early=sum(iteration < begins for iteration, _ in findings),
        delay=first - begins + 1,
        kinds=tuple(sorted({kind for _, kind in findings})),
        wins=_wins(run, options.episodes),
        returns=len(read_record(run).get("branches", ())),
        said=said,
    )


def _wins(run: Path, episodes: int) -> float:
    """Percent of held-out games that the last checkpoint wins; kept beside the run, which has
    ended."""
    kept = run.with_name(f"{run.name}.{episodes}.json")
    if not kept.is_file():
        kept.write_text(_earl("evaluate", run, "--episodes", episodes, "--json")[1])
    outcomes: dict[str, Any] = json.loads(kept.read_text().splitlines()[-1])["outcomes"]
    return 100 * float(outcomes.get("win", {}).get("share", 0.0))


def _row(threat: str, guard: str, ends: Sequence[_End]) -> Row:
    """The ends of one arm, over the seeds."""
    wins = [end.wins for end in ends]
    return {
        "threat": threat,
        "guard": guard,
        "noticed after": ", ".join("-" if math.isinf(e.delay) else f"{e.delay:.0f}" for e in ends),
        "by": ", ".join(sorted({kind for end in ends for kind in end.kinds})) or "-",
        "wins %": ", ".join(f"{each:.0f}" for each in wins),
        "mean wins %": statistics.fmean(wins),
        "went back": ", ".join(str(end.returns) for end in ends),
        "stopped": sum(bool(end.said) for end in ends),
    }


def _notes(options: Any) -> list[str]:
    return [
        f"{options.seeds} seeds; the threat begins in iteration {options.begins} of "
        f"{options.iterations}, of {8 * options.prompts} episodes each. noticed after: 1 is the "
        "iteration itself, - is never.",
        f"wins: {options.episodes} held-out games without any threat, of the last checkpoint. "
        "went back: how often the run opened a branch. stopped: runs that the guard ended.",
        f"Clean runs: {options.clean_seeds} seeds of each kind; guard_false_alarms counts findings "
        "in all their iterations. guard_delay: the worst of the seeds and of both guards.",
        "Flips, NaN and large rewards are drawn anew at each call, so that nobody can repeat them.",
    ]


if __name__ == "__main__":
    main()

"""One run of `no_limit` under the cap, and what its run directory says afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earl_core.config import load_config
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.run.record import read_lines
from earl_core.system.files import write_atomic
from tools.harness import REPOSITORY
from tools.memory_cap import MemoryCap
from tools.process_tree import TIMEOUT_SECONDS, train_command

CONFIG = REPOSITORY / "benchmarks" / "no_limit.yaml"
LAST_ITERATIONS = 3
"""A run's final return is the mean of so many iterations."""

_CUT = ("max_tokens", "max_turns", "model_context")


@dataclass(frozen=True)
class Arm:
    """One way to run: what it is called, and the settings in which it differs. cut_at: floors after
    which episodes are cut; 0: never."""

    name: str
    overrides: tuple[str, ...] = ()
    cut_at: int = 0


@dataclass
class Finished:
    """The end of a run.

    metrics: a line for each iteration that it finished. plans: the sealed plan of each iteration
    that it began. exit_code: of `earl train`. kills: processes that the kernel killed for memory.
    peak_bytes: most memory that all processes held together. cause: the end of the run's own words.
    held_out: mean return of the last policy on held-out episodes without any limit.
    """

    arm: Arm
    seed: int
    asked: int
    directory: Path
    exit_code: int
    kills: int
    peak_bytes: int
    metrics: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    minutes: float = 0.0
    cause: str = ""
    held_out: float | None = None

    @property
    def survived(self) -> bool:
        """True when the run did every iteration."""
        return self.exit_code == 0 and len(self.metrics) >= self.asked

    def series(self, name: str) -> list[float]:
        """A metric, iteration by iteration."""
        return [float(line.get(name, 0.0)) for line in self.metrics]

    @property
    def final_return(self) -> float:
        """Mean training return of the last iterations that it did; 0 when there are none."""
        last = self.series("rollout/return/mean")[-LAST_ITERATIONS:]
        return sum(last) / len(last) if last else 0.0

    @property
    def cut_share(self) -> float:
        """Share of the last iterations' episodes that did not end by themselves."""
        last = self.metrics[-LAST_ITERATIONS:]
        cut = [sum(line.get(f"rollout/finish/{name}", 0.0) for name in _CUT) for line in last]
        return sum(cut) / len(cut) if cut else 0.0

    @property
    def cut_ever(self) -> float:
        """Episodes of the whole run that did not end by themselves."""
        names = [f"rollout/finish/{name}" for name in _CUT]
        return sum(
            float(line.get(name, 0.0) * line["rollout/episodes"])
            for line in self.metrics
            for name in names
        )

    def layouts(self) -> list[str]:
        """Each iteration's layout in words."""
        return [layout_text(plan) for plan in self.plans]

    def switches(self) -> list[int]:
        """Iterations whose layout is another one than that of the iteration before."""
        texts = self.layouts()
        return [k for k in range(1, len(texts)) if texts[k] != texts[k - 1]]

    def repeats(self) -> int:
        """Number of times that a stage did not fit and was done again under another layout."""
        return sum(int(plan.get("attempt", 0)) for plan in self.plans)

    def lengths(self) -> list[int]:
        """Contexts that the engines were built for, one after another."""
        built = [int(plan["stages"]["rollout"]["max_model_len"] or 0) for plan in self.plans]
        return [length for k, length in enumerate(built) if k == 0 or length != built[k - 1]]


def layout_text(plan: dict[str, Any]) -> str:
    """Describe the settings of engine and update that differ between plans here."""
    rollout, update = plan["stages"]["rollout"], plan["stages"]["update"]
    engines = f"{rollout['replicas']} engine{'s' if rollout['replicas'] > 1 else ''}"
    words = [engines]
    if rollout.get("max_running_requests"):
        words.append(f"{rollout['max_running_requests']} running")
    words.append(f"microbatch {update['max_tokens_per_microbatch']}")
    rung = update["activation_checkpointing"]
    words += {"none": [], "full": ["checkpointing"]}.get(rung, [f"{rung} checkpointing"])
    chunk = update.get("logits_chunk_tokens")
    words += [f"logits by {chunk}"] if chunk else []
    return ", ".join(words)


def run_capped(
    arm: Arm, seed: int, cap_bytes: int, scratch: Path, common: Sequence[str], iterations: int
) -> Finished:
    """Train under the cap to the run's end, whatever that is; what an earlier call finished in
    `scratch` is not repeated."""
    name = f"{arm.name.replace(' ', '_')}_{seed}"
    ending = scratch / f"{name}.json"
    if not ending.exists():
        # Without its ending, what there is of the run was cut off.
        shutil.rmtree(scratch / "runs" / name, ignore_errors=True)
        ended = _run(arm, seed, cap_bytes, scratch, common, iterations, name)
        write_atomic(ending, json.dumps(ended).encode())
    code, kills, peak = json.loads(ending.read_text())
    run = scratch / "runs" / name
    found = Finished(arm, seed, iterations, run, code, kills, peak)
    found.metrics = read_lines(run / "metrics.jsonl")
    found.plans = _plans(run)
    ledger = read_lines(run / "ledger.jsonl")
    found.minutes = (ledger[-1]["time"] - ledger[0]["time"]) / 60 if ledger else 0.0
    if code:
        found.cause = _last_words(scratch / f"{name}.log")
    return found


def _run(
    arm: Arm,
    seed: int,
    cap_bytes: int,
    scratch: Path,
    common: Sequence[str],
    iterations: int,
    name: str,
) -> tuple[int, int, int]:
    """Exit code, kills and peak bytes."""
    settings = [
        f"name={name}",
        f"seed={seed}",
        f"iterations={iterations}",
        f"runs_directory={scratch / 'runs'}",
        *common,
        *arm.overrides,
    ]
    command = train_command(CONFIG, settings, "--plain")
    log = scratch / f"{name}.log"
    with MemoryCap(cap_bytes) as cap, log.open("wb") as output:
        process = subprocess.Popen(
            cap.entering(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_SECONDS)
        finally:
            _end(process)
            cap.end_all()
    return code, cap.kills, cap.peak_bytes


def play_held_out(found: Finished, episodes: int) -> float | None:
    """Mean return of the run's last checkpoint without a limit and without a cap; None: no one."""
    path = found.directory
    if not list((path / "checkpoints").glob("*/STABLE")):
        return None
    config = load_config(
        path / "config.yaml", ["rollout.max_tokens_per_episode=null", "rollout.max_turns=1000000"]
    )
    with PolicyPlayer(config, find_checkpoint(path, config)) as player:
        result = player.evaluate(episodes, None)
    return float(result["metrics"]["return/mean"])


def _plans(run: Path) -> list[dict[str, Any]]:
    paths = sorted((run / "iterations").glob("*/select.json"))
    return [json.loads(path.read_text())["outputs"]["plan"] for path in paths]


def _last_words(log: Path) -> str:
    """The line that says why the run ended, else its last one."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.strip()]
    errors = [line for line in said if line.lower().startswith("error")]
    return (errors or said or ["it said nothing"])[-1].strip()[:300]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

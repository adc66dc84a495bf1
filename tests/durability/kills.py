"""SIGKILLs at random times over every process of a run, whose weights must not show them.

    python -m tests.durability.kills --directory DIRECTORY [--trials 50] [--minutes 30] [--quick]

Each trial is a run of its own. While it trains, processes of it are killed one after another: the
controller, ranks of every role, supervisors, the fork server, environment hosts, Prefect's server,
the spill. A run
whose process ends is resumed. In the end its weights must equal those of an undisturbed run, with
as many updates in them as iterations, and no process of it and no file in shared memory may be
left. Trials and kills follow from the seed, their effects from the machine's timing. Finished
trials are kept in DIRECTORY/results.jsonl: started again, the campaign goes on with the next one.
Ends with 1 if anything was wrong. Trials take turns: one rank; two ranks with a spill and a
checkpoint every other iteration; two engines and two ranks, where an engine that plays another's
episodes may change the last bits: there weights may differ by a hundredth of what they move.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.numpy import load_file

from earl_core.run.checkpoints import verify_training_state

REPOSITORY = Path(__file__).parents[2]
MARK = "EARL_CAMPAIGN"
ITERATIONS = 4
_MANY_KINDS, _SPARED = 5, 0.8
"""A process that only starts, with few kinds of others beside it, is mostly left alone: it takes
as long as several iterations, and would get most of the kills."""
_ENDS_THE_PROCESS = ("controller", "Prefect's server")
_SELDOM = 0.3
"""How often these are chosen, to any other kind's once: after them all has to start again."""
_TRIAL_SECONDS = 1800.0
_LAST_BITS = 8e-5
"""A weight moves by 8e-3 at most: eight steps of Adam at a rate of 1e-3."""
_ENDING_SECONDS = 60.0
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {
        "stages": {"update": {"shard": 2}},
        "checkpoint": {"every": 2},
        "dispatch": {"durability": "spill"},
    },
    {"stages": {"rollout": {"replicas": 2}, "update": {"shard": 2}}},
)


def main() -> int:
    options = _options()
    os.nice(options.nice)
    directory: Path = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.jsonl"
    until = time.monotonic() + 60 * options.minutes
    for number in range(options.trials):
        if number in {each["trial"] for each in read_results(results)}:
            continue
        if time.monotonic() > until:
            break
        variant = number % len(_VARIANTS)
        expected = undisturbed(directory, variant)
        trial = Trial(directory, number, variant, options.seed, options.pause)
        found = trial.run(options.kills, expected)
        with results.open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        print(
            f"trial {number}: {len(found['kills'])} kills, {found['problems'] or 'good'}",
            flush=True,
        )
    done = read_results(results)
    print(table(done))
    return int(any(each["problems"] for each in done))


class Trial:
    """One run and those who kill it."""

    def __init__(
        self, directory: Path, number: int, variant: int, seed: int, mean_pause: float = 1.0
    ) -> None:
        self.number, self.variant, self.mean_pause = number, variant, mean_pause
        self.scratch = directory / f"trial-{number}"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self.mark = f"{directory.name}-{number}-{os.getpid()}"
        self.chance = random.Random(f"{seed}-{number}")
        self.config = self.scratch / "run.yaml"
        self.config.write_text(yaml.safe_dump(settings(self.scratch, directory / "model", variant)))
        self.run_directory = self.scratch / "runs" / "run"
        self.kills: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.processes = 0

    def run(self, kills: int, expected: Path | None) -> dict[str, Any]:
        """Train to the end with that many kills on the way; what was done and what was wrong."""
        started = time.monotonic()
        while True:
            process = self.start()
            while process.poll() is None and time.monotonic() - started < _TRIAL_SECONDS:
                self.pause(process)
                if process.poll() is None and len(self.kills) < kills:
                    self.kill_one(process)
            if process.poll() is None:
                self.problems.append(f"not at its end after {_TRIAL_SECONDS:.0f} s")
                process.kill()
                process.wait()
                break
            if self.kills and self.kills[-1]["code"] is None:
                self.kills[-1]["code"] = process.returncode
            self.wait_for_the_end_of_all()
            if process.returncode == 0:
                break
            if not kills or self.processes > 3 * kills + 3:
                self.problems.append(f"the process ends with {process.returncode}")
                break
        if not self.problems:
            self.check(expected)
        return {
            "trial": self.number,
            "variant": self.variant,
            "kills": self.kills,
            "processes": self.processes,
            "seconds": round(time.monotonic() - started, 1),
            "problems": self.problems,
        }

    def start(self) -> subprocess.Popen[bytes]:
        """`earl train`, or `earl resume` once there is a run."""
        there = (self.run_directory / "config.yaml").is_file()
        command = ["resume", str(self.run_directory)] if there else ["train", str(self.config)]
        self.processes += 1
        environment = {**os.environ, MARK: self.mark, "NO_COLOR": "1"}
        environment["PYTHONPATH"] = str(REPOSITORY)
        environment.pop("PREFECT_API_URL", None)
        with (self.scratch / f"output-{self.processes}.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *command, "--plain"],
                cwd=self.scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pause(self, process: subprocess.Popen[bytes]) -> None:
        """A random while, or until the process ends."""
        until = time.monotonic() + self.chance.expovariate(1 / self.mean_pause)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def kill_one(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to a random process of a random kind."""
        if not (self.run_directory / "ledger.jsonl").is_file():
            return
        kinds: dict[str, list[psutil.Process]] = {}
        for each in self.marked():
            if kind := self.kind_of(each, process.pid):
                kinds.setdefault(kind, []).append(each)
        few = len(kinds) < _MANY_KINDS and self.chance.random() < _SPARED
        if few or not kinds:
            return
        names = sorted(kinds)
        weights = [_SELDOM if name in _ENDS_THE_PROCESS else 1.0 for name in names]
        (kind,) = self.chance.choices(names, weights)
        victim = self.chance.choice(sorted(kinds[kind], key=lambda each: each.pid))
        last = json.loads((self.run_directory / "ledger.jsonl").read_bytes().splitlines()[-1])
        at = f"{last['stage']} {last['iteration']} {last['event'][:40]}"
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills.append({"kind": kind, "after": at, "code": None})

    def kind_of(self, process: psutil.Process, controller: int) -> str:
        """What a process is for the run; empty for those that only start others."""
        try:
            command = " ".join(process.cmdline())
            if process.pid == controller:
                return "controller"
            if "earl_core.cluster.rank_process" in command:
                log = Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
                return f"rank: {log.partition('-')[0]}"
        except (psutil.Error, OSError):
            return ""
        for part, kind in (
            ("earl_core.cluster.fork_server", "fork server"),
            ("earl_core.cluster.supervisor", "supervisor"),
            ("earl_core.environments.hosting.host", "environment host"),
            ("earl_core.dispatch.spill.process", "spill"),
            ("flows.server", "Prefect's server"),
        ):
            if part in command:
                return kind
        return ""

    def marked(self) -> Iterator[psutil.Process]:
        """All live processes of the trial."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    yield process
            except psutil.Error:
                continue

    def wait_for_the_end_of_all(self) -> None:
        """Of the controller's processes, once it is gone itself."""
        until = time.monotonic() + _ENDING_SECONDS
        while left := list(self.marked()):
            if time.monotonic() > until:
                self.problems.append(f"left: {[' '.join(p.cmdline())[:120] for p in left]}")
                for process in left:
                    process.kill()
                return
            time.sleep(0.2)

    def check(self, expected: Path | None) -> None:
        """Note what is not as after an undisturbed run, whose last checkpoint is `expected`."""
        checkpoint = last_checkpoint(self.run_directory)
        if expected is not None:
            allowed = _LAST_BITS if engines(self.variant) > 1 else 0.0
            difference = largest_difference(checkpoint, expected)
            if not difference <= allowed:
                self.problems.append(f"weights differ by {difference:g}, more than {allowed:g}")
        version = verify_training_state(checkpoint)["policy_version"]
        if version != ITERATIONS:
            self.problems.append(f"{version} updates in {ITERATIONS} iterations")
        if left := [path.name for path in (self.scratch / "shm").rglob("*.arrow")]:
            self.problems.append(f"in shared memory: {left}")
        norms = gradient_norms(self.run_directory)
        if len(norms) != ITERATIONS or min(norms) <= 0:
            self.problems.append(f"gradient norms: {norms}")


def settings(scratch: Path, model: Path, variant: int) -> dict[str, Any]:
    """The configuration of a trial: fp32, the torch engine, one thread, all roles at work."""
    config: dict[str, Any] = {
        "name": "run",
        "seed": 3,
        "iterations": ITERATIONS,
        "runs_directory": str(scratch / "runs"),
        "model": {
            "path": str(model),
            "builder": "earl_core.models.tiny:build",
            "builder_options": {
                "hidden": 64,
                "layers": 2,
            },
        },
        "environment": {"name": "tic_tac_toe", "options": {"style": "compact"}},
        "rollout": {
            "engine": "torch",
            "prompts_per_iteration": 16,
            "group_size": 8,
            "max_turns": 5,
            "max_tokens_per_turn": 2,
            "dtype": "float32",
            "threads": 1,
        },
        "algorithm": {"advantage": "grpo", "kl": {"placement": "loss", "coefficient": 0.01}},
        "update": {"precision": "fp32", "learning_rate": 1e-3, "minibatches": 2, "threads": 1},
        "dispatch": {"directory": str(scratch / "shm")},
        "tracking": {"enabled": False},
    }
    for section, values in _VARIANTS[variant].items():
        config[section] = {**config.get(section, {}), **values}
    if config["dispatch"].get("durability") == "spill":
        config["dispatch"]["spill_url"] = f"file://{scratch / 'spill'}"
    return config


def undisturbed(directory: Path, variant: int) -> Path:
    """The last checkpoint of a run that nobody kills, made once for each state of the code."""
    known = directory / f"undisturbed-{variant}-{code_digest()}"
    if not known.exists():
        trial = Trial(directory, -1 - variant, variant, 0)
        found = trial.run(0, None)
        if found["problems"]:
            output = (trial.scratch / "output-1.txt").read_text()[-4000:]
            raise SystemExit(f"the undisturbed run failed: {found['problems']}\n{output}")
        shutil.copytree(last_checkpoint(trial.run_directory), known)
    return known


def code_digest() -> str:
    """Of everything that may change what a run computes."""
    digest = hashlib.sha256()
    for package in ("earl_core", "tasks", "flows"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"{ITERATIONS - 1:06d}"


def engines(variant: int) -> int:
    return int(_VARIANTS[variant].get("stages", {}).get("rollout", {}).get("replicas", 1))


def largest_difference(one: Path, other: Path) -> float:
    """Between the weights of two checkpoints, and where they must be equal of their optimizers'
    states; infinite where one has what the other has not."""
    names = {path.relative_to(one) for path in one.rglob("*.safetensors")}
    if not names or names != {path.relative_to(other) for path in other.rglob("*.safetensors")}:
        return float("inf")
    found = 0.0
    for name in names:
        if (one / name).read_bytes() == (other / name).read_bytes():
            continue
        mine, theirs = load_file(one / name), load_file(other / name)
        if name.parts[0] == "policy":
            found = max(found, *(float(abs(mine[key] - theirs[key]).max()) for key in mine))
        else:
            found = max(found, 1e-12)
    return found


def gradient_norms(run: Path) -> list[float]:
    """Of each iteration, as last trained."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    latest = {line["iteration"]: float(line["update/grad_norm"]) for line in lines}
    return [latest[iteration] for iteration in sorted(latest)]


def read_results(path: Path) -> list[dict[str, Any]]:
    """The finished trials."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def table(results: list[dict[str, Any]]) -> str:
    """Kills by what was killed, and how many of them ended the run's process."""
    kills: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for each in results:
        for kill in each["kills"]:
            kills[kill["kind"]] += 1
            ended[kill["kind"]] += kill["code"] not in (None, 0)
    lines = ["| killed | kills | the run went on | it had to be resumed |", "|---|--:|--:|--:|"]
    for kind in sorted(kills):
        went_on = kills[kind] - ended[kind]
        lines.append(f"| {kind} | {kills[kind]} | {went_on} | {ended[kind]} |")
    wrong = [each for each in results if each["problems"]]
    lines.append(
        f"\n{len(results)} runs, {sum(kills.values())} kills, {len(wrong)} runs with problems"
    )
    lines += [f"trial {each['trial']}: {each['problems']}" for each in wrong]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=8, help="In each trial, at the most.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="No trial after that.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause",
        type=float,
        default=6.0,
        help="Mean seconds between kills; more where a run is slow.",
    )
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="Two trials of three kills.")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.kills = 2, 3
    return options


if __name__ == "__main__":
    sys.exit(main())

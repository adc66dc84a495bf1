"""Training processes for tests: started, awaited, killed; and what they left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import psutil

from earl_core.pretrained.adapter_directory import is_adapter, policy_in
from earl_core.run.record import read_lines
from tests import warm
from tests.learnt import SMALLEST_CHANGE, assert_learnt, largest_change, weights_in

REPOSITORY = Path(__file__).parents[2]
STAGES = ["select", "rollout", "reward", "reference", "advantage", "update", "publish"]
KILLED = -9

LEARNING = (
    "iterations=4",
    "algorithm.kl={placement: none, coefficient: 0}",
    "rollout.prompts_per_iteration=8",
    "update.max_tokens_per_microbatch=256",
)
"""Overrides of runs whose learning curves are compared."""


Process: TypeAlias = subprocess.Popen[str] | warm.Started


@dataclass
class Runs:
    """Processes that train with one configuration file."""

    config: Path
    directory: Path
    model: Path
    environment: dict[str, str]
    forked: bool = True
    """Start processes by `tests.warm`, and not as `python -m` starts them."""
    started: list[Process] = field(default_factory=list)

    def start(self, *overrides: str, fault: str = "") -> Process:
        """Start training; `fault` is a value of EARL_FAULT."""
        return self._start("tests.flows.driver", *overrides, fault=fault)

    def _start(self, module: str, *arguments: str, fault: str) -> Process:
        environment = {**self.environment, "PYTHONPATH": str(REPOSITORY)}
        if fault:
            environment["EARL_FAULT"] = fault
        # A file, for a pipe that nobody reads stops a long run.
        with self.output_path(len(self.started)).open("w") as output:
            process = self._process(module, [str(self.config), *arguments], environment, output)
        self.started.append(process)
        return process

    def _process(
        self, module: str, arguments: list[str], environment: dict[str, str], output: TextIO
    ) -> Process:
        # What is forked is in the group of whom it is forked from.
        if self.forked and "EARL_TEST_CGROUP" not in environment:
            imports = warm.CONTROLLER if module.endswith("driver") else warm.ALL
            return warm.start(module, arguments, environment, REPOSITORY, output.fileno(), imports)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def train_here(self, *steps: dict[str, Any]) -> list[str | None]:
        """Train again and again in one process, worker groups included: `in_process`'s steps.

        Why each training ended; None: at its end.
        """
        place = self.directory / f"steps-{len(self.started)}.json"
        place.write_text(json.dumps(steps))
        limit = 300 + 60 * len(steps)
        self._start("tests.flows.in_process", str(place), fault="").wait(limit)
        endings: list[str | None] = json.loads(place.read_text())
        # The steps are still there where the process itself has failed.
        assert endings != list(steps), self.output_path(len(self.started) - 1).read_text()
        return endings

    def train(self, *overrides: str, fault: str = "", expect: int = 0) -> str:
        """Train to the end of the process; its output. Fails on another exit status."""
        process = self.start(*overrides, fault=fault)
        process.wait(500)
        output = self.output_path(len(self.started) - 1).read_text()
        assert process.returncode == expect, output
        return output

    def script(self, text: str, imports: Sequence[str]) -> str:
        """Run a Python script in `directory` to its end; its output. imports: modules that it
        needs. Fails where the script does."""
        name = f"script_{len(self.started)}"
        (self.directory / f"{name}.py").write_text(text)
        with self.output_path(len(self.started)).open("w") as output:
            given = {**self.environment, "PYTHONPATH": str(REPOSITORY)}
            process = warm.start(name, [], given, self.directory, output.fileno(), imports)
        self.started.append(process)
        process.wait(500)
        printed = self.output_path(len(self.started) - 1).read_text()
        assert process.returncode == 0, printed
        return printed

    def output_path(self, number: int) -> Path:
        """What the process that was started as number `number` printed."""
        return self.directory / f"output-{number}.txt"

    def kill_all(self) -> None:
        """End what is left, the workers too."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, name: str = "run") -> Path:
        """A run's directory."""
        return self.directory / "runs" / name

    def ledger(self, name: str = "run") -> list[dict[str, Any]]:
        """What was really executed; nothing yet where the run has no ledger."""
        return read_lines(self.run(name) / "ledger.jsonl")

    def executed(self, event: str, name: str = "run") -> list[tuple[int, str]]:
        """(iteration, stage) of every ledger line with this event."""
        return [(x["iteration"], x["stage"]) for x in self.ledger(name) if x["event"] == event]

    def weights(self, iteration: int, name: str = "run") -> str:
        """Digest of the checkpoint's weights and optimizer state."""
        digest = hashlib.sha256()
        checkpoint = self.run(name) / "checkpoints" / f"{iteration:06d}"
        for file in sorted(checkpoint.rglob("*.safetensors")):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def policy(self, iteration: int, name: str = "run") -> Path:
        """The model directory of a checkpoint, or the adapter's."""
        return policy_in(self.run(name) / "checkpoints" / f"{iteration:06d}")

    def metrics(self, name: str = "run") -> list[dict[str, float]]:
        """What was measured, a line for each iteration."""
        return read_lines(self.run(name) / "metrics.jsonl")

    def assert_learnt(self, name: str = "run", than: str | None = None) -> None:
        """Every iteration had a gradient, and the last weights are others than the initial ones;
        and others than those of the run `than`, of another seed."""
        lines = self.metrics(name)
        last = max(int(line["iteration"]) for line in lines)
        weights = weights_in(self.policy(last, name))
        norms = [line["update/grad_norm"] for line in lines]
        first = self.policy(0, name)
        # The model itself has no pairs.
        before = weights_in(first if is_adapter(first) else self.model)
        assert_learnt(norms, before, weights)
        if than is not None:
            assert largest_change(weights, weights_in(self.policy(last, than))) > SMALLEST_CHANGE

    def shared_memory(self) -> list[Path]:
        """Files of any run in shared memory."""
        return [path for path in (self.directory / "shm").rglob("*") if path.is_file()]

    def workers(self) -> list[psutil.Process]:
        """Live worker processes of these runs."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or ())
            if "earl_core.cluster" in command and _mentions(process, str(self.directory)):
                found.append(process)
        return found

    def wait_for_workers_to_end(self, seconds: float = 240.0) -> None:
        """Fail unless every worker process is gone within this time."""
        deadline = time.monotonic() + seconds
        while left := self.workers():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in file.path for file in process.open_files())
    except psutil.Error:
        return False

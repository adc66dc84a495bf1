"""Growth with the iterations of a run: databases, files, memory.

    python -m tools.long_run --iterations 1000

Trains a model of some thousand parameters as `earl train` does, with its own Prefect server and
MLflow file, in a directory of its own, and prints a table at each tenth of the way. Ends by itself;
about a second an iteration on a quiet two-core machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tools.endings import end_with_us
from tools.harness import REPOSITORY
from tools.process_tree import train_command

SETTINGS = {
    "name": "long",
    "model.path": "model",
    "model.builder_options.hidden": "32",
    "model.builder_options.layers": "1",
    "model.builder_options.heads": "2",
    "model.builder_options.warm_start_steps": "0",
    "rollout.prompts_per_iteration": "2",
    "rollout.group_size": "2",
    "rollout.threads": "1",
    "update.threads": "1",
    "evaluation.every": "0",
    "checkpoint.every": "1",
}


def bytes_of(*patterns: Path) -> int:
    found = [path for pattern in patterns for path in pattern.parent.glob(pattern.name)]
    return sum(path.stat().st_size for path in found if path.is_file())


def measured(directory: Path, process: psutil.Process) -> dict[str, float]:
    run = directory / "runs" / "long"
    files = [path for path in run.rglob("*") if path.is_file()]
    memory = {"controller": process.memory_info().rss}
    for child in process.children(recursive=True):
        command = " ".join(child.cmdline())
        if "flows.server" in command:
            memory["server"] = child.memory_info().rss
        elif "earl_core.cluster" in command:
            memory["workers"] = memory.get("workers", 0) + child.memory_info().rss
    return {
        "prefect.db KB": bytes_of(directory / "runs" / "prefect" / "prefect.db*") / 1e3,
        "mlflow.db KB": bytes_of(directory / "runs" / "mlflow.db*") / 1e3,
        "files": len(files),
        "run KB": sum(path.stat().st_size for path in files) / 1e3,
        **{f"{name} MB": value / 1e6 for name, value in memory.items()},
    }


def iterations_done(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def watch(directory: Path, process: subprocess.Popen[bytes], iterations: int) -> None:
    run, seen = directory / "runs" / "long", psutil.Process(process.pid)
    begun, before, every = time.time(), {}, max(1, iterations // 10)
    due = every
    while process.poll() is None:
        time.sleep(0.5)
        done = iterations_done(run)
        if done < due:
            continue
        try:
            now = measured(directory, seen)
        except (psutil.Error, FileNotFoundError):
            continue
        shown = [f"{name} {value:,.0f}" for name, value in now.items()]
        if before:
            count = done - before["iterations"]
            shown = [
                f"{text} (+{(now[name] - before.get(name, 0)) / count:,.2f} an iteration)"
                for text, name in zip(shown, now, strict=True)
            ]
        print(f"{done} iterations, {time.time() - begun:.0f} s: " + "; ".join(shown), flush=True)
        before, due = {**now, "iterations": done}, due + every


def main() -> None:
    end_with_us()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000)
    iterations = parser.parse_args().iterations
    shared = Path(tempfile.mkdtemp(prefix="earl-long-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="earl-long-") as name:
        settings = {**SETTINGS, "iterations": iterations, "dispatch.directory": str(shared)}
        given = (f"{key}={value}" for key, value in settings.items())
        process = subprocess.Popen(
            train_command("tictactoe_tiny", given, "--plain"),
            cwd=name,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
        )
        try:
            watch(Path(name), process, iterations)
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(shared, ignore_errors=True)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()

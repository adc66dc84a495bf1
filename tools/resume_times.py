"""Time from `earl resume` to the first stage that begins, and to the first one that is sealed.

A run is killed (SIGKILL) as its second rollout begins, and resumed, again and again. Times count
from the start of the command, by the lines of the run's ledger: imports, Prefect's server, opening
the run and starting its worker groups are in them.

    python -m tools.resume_times --repeats 5 [--engine vllm --model DIRECTORY] [--kl]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.endings import end_with_us

_TIMEOUT_SECONDS = 300.0


def main() -> None:
    options = _options()
    end_with_us()
    with tempfile.TemporaryDirectory(prefix="earl-resume-") as name:
        found = measure(Path(name), options)
    for what in ("first stage", "first seal"):
        times = sorted(each[what] for each in found)
        middle = statistics.median(times)
        print(f"{what}: {middle:.1f} s (median of {len(times)}; {times[0]:.1f} to {times[-1]:.1f})")


def measure(scratch: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds to the first stage and to the first seal, for each resume."""
    settings = [
        "name=run", f"runs_directory={scratch / 'runs'}", f"dispatch.directory={scratch / 'shm'}",
        f"model.path={options.model or scratch / 'model'}", "iterations=3", "checkpoint.every=1",
        "evaluation.every=0", "rollout.prompts_per_iteration=8", "tracking.enabled=false",
    ]  # fmt: skip
    if options.kl:
        settings.append("algorithm.kl={placement: loss, coefficient: 0.01}")
    if options.engine == "vllm":
        settings += ["rollout.engine=vllm", "rollout.dtype=float32"]
    sets = [text for setting in settings for text in ("--set", setting)]
    run = scratch / "runs" / "run"
    _until(["train", options.config, "--plain", *sets], scratch, run, (1, "rollout", "started"), 1)
    found = []
    for attempt in range(2, options.repeats + 2):
        began = time.time()
        # A seal of the rollout would be kept: the next resume needs it missing.
        _until(["resume", str(run), "--plain"], scratch, run, (1, "rollout", "sealed"), attempt)
        lines = [line for line in _ledger(run) if line.get("attempt") == attempt]
        first = {e: min(x["time"] for x in lines if x["event"] == e) for e in ("started", "sealed")}
        found.append(
            {"first stage": first["started"] - began, "first seal": first["sealed"] - began}
        )
        print(json.dumps(found[-1]), flush=True)
        (run / "iterations" / "000001" / "rollout.json").unlink()
    return found


def _until(
    command: list[str], scratch: Path, run: Path, wanted: tuple[int, str, str], attempt: int
) -> None:
    """Run `earl` until the ledger has this line, then kill it and wait for its workers to end."""
    with (scratch / "output.txt").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *command],
            stdout=output, stderr=output, start_new_session=True, cwd=scratch,
            env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not _has(run, wanted, attempt):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError((scratch / "output.txt").read_text()[-4000:])
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(10)


def _has(run: Path, wanted: tuple[int, str, str], attempt: int) -> bool:
    return any(
        (line["iteration"], line["stage"], line["event"]) == wanted
        and line.get("attempt") == attempt
        for line in _ledger(run)
    )


def _ledger(run: Path) -> list[dict[str, Any]]:
    path = run / "ledger.jsonl"
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", default="tictactoe_tiny")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kl", action="store_true", help="With the reference's ranks.")
    return parser.parse_args()


if __name__ == "__main__":
    main()

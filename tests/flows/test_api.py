"""`flows.api`: runs in scripts and in notebooks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from earl_core.run.lock import is_locked
from tests.flows.runs import REPOSITORY, Runs

pytestmark = pytest.mark.slow

_SCRIPT = """
from flows.api import Run
from earl_core.config import ConfigError

config, model = {config!r}, {model!r}
run = Run.from_file(config, {{"checkpoint.every": 1}}, iterations=4)
for iteration in run:
    assert len(iteration.episodes) == iteration.samples().num_rows == 16
    assert iteration.episodes[0]["turns"]
    if iteration.number == 1:
        break
assert [each.number for each in run.iterations] == [0, 1], run
with Run.open(run.directory) as again:
    for iteration in again:
        assert iteration.metrics["update/grad_norm"] > 0
        if iteration.number == 2:
            # The training waits meanwhile.
            result = again.evaluate(episodes=8)
            assert result["episodes"] == 8 and result["policy_version"] == 3, result
            try:
                next(iter(Run.from_file(config, name="third")))
            except Exception as error:
                assert "is trained in this process already" in str(error), error
assert [line["iteration"] for line in again.metrics] == [0, 1, 2, 3]
assert list(again) == []
print(again.play(checkpoint=3, seed=1))
second = Run.from_file(config, name="second", iterations=1)
print([repr(iteration) for iteration in second])
try:
    second.evaluate(checkpoint=7)
except ConfigError as error:
    print(error)
"""

_INTERRUPTED = """
from flows.api import Run

for iteration in Run.from_file({config!r}, iterations=500):
    print(iteration.number, flush=True)
"""


def _start(runs: Runs, script: str) -> subprocess.Popen[str]:
    path = runs.directory / "script.py"
    path.write_text(script.format(config=str(runs.config), model=str(runs.model)))
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=runs.directory,
        env={**runs.environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_runs_in_a_script(runs: Runs) -> None:
    script = _start(runs, _SCRIPT)
    output, _ = script.communicate(timeout=240)
    assert script.returncode == 0, output
    assert re.search(r"agent: .*\n(.*\n)*\w+, return [-+]", output), output
    assert "<iteration 0 of second, return" in output
    assert "has no whole checkpoint 7" in output
    runs.assert_learnt()
    updates = [place for place in runs.executed("sealed") if place[1] == "update"]
    assert updates == [(number, "update") for number in range(4)]
    assert not is_locked(runs.run())
    runs.wait_for_workers_to_end()
    assert not runs.shared_memory()


def test_an_interrupted_loop_leaves_a_run_that_can_be_resumed(runs: Runs) -> None:
    script = _start(runs, _INTERRUPTED)
    assert script.stdout is not None
    while script.stdout.readline().strip() != "1":
        assert script.poll() is None
    script.send_signal(signal.SIGINT)
    output, _ = script.communicate(timeout=60)
    assert output.rstrip().endswith("KeyboardInterrupt"), output
    assert not is_locked(runs.run())
    runs.wait_for_workers_to_end()
    done = len(runs.metrics())
    (ending,) = runs.train_here({"overrides": [f"iterations={done + 1}"]})
    assert ending is None
    assert len(runs.metrics()) == done + 1
    assert len(runs.executed("sealed")) == len(set(runs.executed("sealed")))


def test_the_notebook(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(REPOSITORY / "docs" / "notebooks" / "tictactoe.ipynb", as_version=4)
    small = {
        "model.path": str(runs.model),
        "rollout.prompts_per_iteration": 4,
        "rollout.group_size": 4,
        "checkpoint.every": 1,
        "evaluation.every": 0,
        "dispatch.directory": str(runs.directory / "shm"),
        "tracking.enabled": False,
    }
    (given,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    given.source = f"import json\nsettings = json.loads({json.dumps(small)!r})\niterations = 2"
    for name, value in {**runs.environment, "PYTHONPATH": str(REPOSITORY)}.items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(runs.directory)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "<iteration 1 of tictactoe_notebook, return" in text
    assert re.search(r"\d%   [\d.]+% to [\d.]+%", text)
    deadline = time.monotonic() + 20
    while is_locked(runs.directory / "runs" / "tictactoe_notebook"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert Path(os.environ["PREFECT_HOME"]).is_dir()

"""`flows.api`: runs in scripts and in notebooks."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from earl_core.run.lock import is_locked
from flows.api import Run
from tests import warm
from tests.flows.runs import REPOSITORY, Runs

pytestmark = pytest.mark.slow

_SCRIPT = """
import os
import pathlib
import signal
import threading
import time

gate = pathlib.Path("gate").absolute()
gate.touch()
os.environ |= {{"EARL_FAULT": "update.step0@2=wait", "EARL_FAULT_GATE": str(gate)}}
from flows.api import Run
from earl_core.config import ConfigError
from earl_core.run.record import read_lines

def interrupt(ledger):
    "In the middle of iteration 2, which does not end before."
    begun = {{"iteration": 2, "stage": "update", "event": "started"}}
    while not any(begun.items() <= line.items() for line in read_lines(ledger)):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    gate.unlink()

config = {config!r}
run = Run.from_file(config, {{"checkpoint.every": 1}}, iterations=4)
for iteration in run:
    assert len(iteration.episodes) == iteration.samples().num_rows == 16
    assert iteration.episodes[0]["turns"]
    break
assert [each.number for each in run.iterations] == [0], run
try:
    for iteration in run:
        threading.Thread(target=interrupt, args=(run.directory / "ledger.jsonl",)).start()
    raise AssertionError("it was not interrupted")
except KeyboardInterrupt:
    print("interrupted after", iteration.number)
assert iteration.number == 1
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


def test_settings_arrive_as_they_were_given() -> None:
    given = {"rollout.answer_prefix": "\N{GRINNING FACE} a: 'b'", "update.learning_rate": 1e-6}
    config = Run.from_recipe("tictactoe_tiny", given, name="7").config
    assert config.rollout.answer_prefix == given["rollout.answer_prefix"]
    assert config.update.learning_rate == 1e-6
    assert config.name == "7"


def test_runs_in_a_script(runs: Runs) -> None:
    script = _SCRIPT.format(config=str(runs.config))
    output = runs.script(script, warm.CONTROLLER)
    assert re.search(r"agent: .*\n(.*\n)*\w+, return [-+]", output), output
    assert "<iteration 0 of second, return" in output
    assert "has no whole checkpoint 7" in output
    runs.assert_learnt()
    updates = [place for place in runs.executed("sealed") if place[1] == "update"]
    assert updates == [(number, "update") for number in range(4)]
    assert not is_locked(runs.run())
    runs.wait_for_workers_to_end()
    assert not runs.shared_memory()


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
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "<iteration 1 of tictactoe_notebook, return" in text
    assert re.search(r"\d%   [\d.]+% to [\d.]+%", text)
    deadline = time.monotonic() + 120
    while is_locked(runs.directory / "runs" / "tictactoe_notebook"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert Path(os.environ["PREFECT_HOME"]).is_dir()

"""`earl debug`: breakpoint() in an environment, and a stage repeated from its sealed inputs."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import pexpect
import pytest

from earl_core.dispatch import read_manifest
from tests.flows.runs import REPOSITORY, Runs

_GAME = """
from earl_core.environments.games.tic_tac_toe import TicTacToe


class Stopping:
    def __init__(self, **options):
        self._game = TicTacToe(TicTacToe.options_model(style="compact"))

    def reset(self, prompt, seed):
        return self._game.reset(prompt, seed)

    def step(self, text):
        steps.append(text)
        if len(steps) == 1:
            breakpoint()
        return self._game.step(text)

    def close(self):
        pass


steps = []
"""


def _debug(runs: Runs, *arguments: str) -> pexpect.spawn[str]:
    environment = {**runs.environment, "PYTHONPATH": f"{REPOSITORY}:{runs.directory}"}
    # Nothing is asked of a Prefect server.
    for name in [name for name in environment if name.startswith("PREFECT_")]:
        del environment[name]
    return pexpect.spawn(
        sys.executable,
        ["-m", "flows.cli", "debug", *arguments],
        cwd=str(runs.directory),
        env={**environment, "NO_COLOR": "1", "COLUMNS": "100"},
        encoding="utf-8",
        timeout=180,
    )


def _digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_breakpoint_in_an_environment(runs: Runs) -> None:
    (runs.directory / "stopping.py").write_text(_GAME)
    config = "{name: 'stopping:Stopping', deterministic: false}"
    session = _debug(runs, str(runs.config), "--set", f"environment={config}")
    session.expect_exact("(Pdb) ")
    session.sendline("import threading; p threading.current_thread() is threading.main_thread()")
    session.expect_exact("(Pdb) ")
    session.sendline("p len(steps), type(self).__name__")
    session.expect_exact("(1, 'Stopping')")
    session.sendline("c")
    session.expect(r"iteration 0: return [-+]\d")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 0
    # Leaving the debugger ends the command and no episode.
    session = _debug(runs, str(runs.config), "--set", f"environment={config}")
    session.expect_exact("(Pdb) ")
    session.sendline("q")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 130
    assert not (runs.directory / "runs" / "run").exists()


@pytest.mark.slow
def test_a_stage_repeated_gives_what_was_sealed_and_leaves_the_run_alone(runs: Runs) -> None:
    # The shards of iteration 0 went with its checkpoint; those of iteration 1 are still there.
    (ending,) = runs.train_here({"overrides": ["iterations=3"], "fault": "stable.before@1=raise"})
    assert ending is not None
    before, memory = _digests(runs.run()), _digests(runs.directory / "shm")
    for iteration in (0, 1):
        sealed = read_manifest(runs.run() / "iterations" / f"{iteration:06d}" / "update.json")
        assert sealed.metrics["grad_norm"] > 0
        command = ("--stage", "update", "--iteration", str(iteration))
        session = _debug(runs, str(runs.run()), *command)
        session.expect(pexpect.EOF)
        text = session.before or ""
        session.close()
        assert session.exitstatus == 0, text
        assert ("are gone from shared memory" in text) == (iteration == 0), text
        for name in ("loss", "grad_norm"):
            (row,) = re.findall(rf"^{name} +(\S+) +(\S+) *(\S*)\s*$", text, re.MULTILINE)
            assert row[0] == row[1] == f"{sealed.metrics[name]:.8g}"
            assert not row[2], text
    assert _digests(runs.run()) == before
    assert _digests(runs.directory / "shm") == memory

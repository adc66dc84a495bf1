"""`earl debug`: breakpoint() in an environment, and a stage repeated from its sealed inputs."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import pexpect
import pytest

from earl_core.config import ConfigError
from earl_core.dispatch import read_manifest
from flows.cli.debugging import debug
from tests import warm
from tests.flows.runs import REPOSITORY, Runs

_GAME = """
from earl_core.environments.games.tic_tac_toe import TicTacToe


class Stopping:
    def __init__(self, **options):
        self._game = TicTacToe(TicTacToe.options_model(style="compact"))

    def reset(self, prompt, seed):
        self._iteration = prompt // 2
        return self._game.reset(prompt, seed)

    def step(self, text):
        if self._iteration not in seen:
            seen.append(self._iteration)
            breakpoint()
        return self._game.step(text)

    def close(self):
        pass


seen = []
"""


DEBUGGING = """
import os

os.environ |= {"NO_COLOR": "1", "COLUMNS": "200"}
from flows.cli.debugging import debug
"""
"""The beginning of a script that repeats stages."""


def _digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _environment(runs: Runs) -> dict[str, str]:
    """Without a Prefect server, of which nothing is asked, and without what Ray leaves behind in a
    process that used it."""
    left = ("PREFECT_", "PYTHONBREAKPOINT")
    kept = {k: v for k, v in runs.environment.items() if not k.startswith(left)}
    paths = f"{REPOSITORY}:{runs.directory}"
    return {**kept, "PYTHONPATH": paths, "NO_COLOR": "1", "COLUMNS": "100"}


@pytest.mark.slow
def test_breakpoint_in_an_environment(runs: Runs) -> None:
    (runs.directory / "stopping.py").write_text(_GAME)
    game = "environment={name: 'stopping:Stopping', deterministic: false}"
    session = pexpect.spawn(
        sys.executable,
        ["-m", "flows.cli", "debug", str(runs.config), "--iterations", "2", "--set", game],
        cwd=str(runs.directory),
        env=_environment(runs),
        encoding="utf-8",
        timeout=180,
    )
    session.expect_exact("(Pdb) ")
    session.sendline("import threading ;; p threading.current_thread() is threading.main_thread()")
    session.expect_exact("True")
    session.expect_exact("(Pdb) ")
    session.sendline("p seen, type(self).__name__")
    session.expect_exact("([0], 'Stopping')")
    session.expect_exact("(Pdb) ")
    session.sendline("c")
    session.expect(r"iteration 0: return [-+]\d")
    # Leaving the debugger ends the command and no episode.
    session.expect_exact("(Pdb) ")
    session.sendline("q")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 130
    assert not (runs.directory / "runs" / "run").exists()
    assert not runs.shared_memory()


@pytest.mark.slow
def test_a_stage_repeated_gives_what_was_sealed_and_leaves_the_run_alone(runs: Runs) -> None:
    # The shards of iteration 0 went with its checkpoint; those of iteration 1 are still there.
    (ending,) = runs.train_here({"overrides": ["iterations=3"], "fault": "stable.before@1=raise"})
    assert ending is not None
    before, memory = _digests(runs.run()), _digests(runs.directory / "shm")
    assert memory
    script = DEBUGGING
    for iteration in (0, 1):
        arguments = f"'update', {iteration}, 1, None, [], 'runs'"
        script += f"debug({str(runs.run())!r}, {arguments})\nprint('----')\n"
    # What cannot be repeated leaves no copies of shards either.
    script += f"try:\n    debug({str(runs.run())!r}, 'publish', 1, 1, None, [], 'runs')\n"
    script += "except Exception as error:\n    print(error)\n"
    printed = runs.script(script, warm.ALL)
    for iteration, text in zip((0, 1), printed.split("----"), strict=False):
        sealed = read_manifest(runs.run() / "iterations" / f"{iteration:06d}" / "update.json")
        assert sealed.metrics["grad_norm"] > 0
        assert ("are gone from shared memory" in text) == (iteration == 0), text
        for name in ("loss", "grad_norm"):
            (row,) = re.findall(rf"^{name} +(\S+) +(\S+) *(\S*) *$", text, re.MULTILINE)
            assert row == (f"{sealed.metrics[name]:.8g}", f"{sealed.metrics[name]:.8g}", ""), text
    assert "--stage takes one of rollout, collect, demonstrate, reward" in printed
    assert _digests(runs.run()) == before
    assert _digests(runs.directory / "shm") == memory


def test_a_mistake_in_a_run_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\niterationz: 2\n")
    with pytest.raises(ConfigError, match="iterationz: unknown key"):
        debug(str(file), None, None, 1, None, [], str(tmp_path))

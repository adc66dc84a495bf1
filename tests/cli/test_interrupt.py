"""Signals: at any moment they end a command with one line, and its work in order."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

WAITING = """
import signal, sys, threading
from pathlib import Path
from flows.cli.interrupt import Interrupted, leave, run_interruptible
told = Path(sys.argv[1])
# Whoever runs the tests under nohup hands that on.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2:] else signal.SIG_DFL)
ended = threading.Event()
def work():
    (told / "started").touch()
    while not (told / "go").exists() and not ended.wait(0.02):
        pass
def say():
    for stream in (sys.stdout, sys.stderr):
        print("Stopping", file=stream, flush=True)
try:
    run_interruptible(work, ended.set, say)
except Interrupted as interrupted:
    say()
    (told / "clean").write_text(str(interrupted.clean))
    leave(interrupted.exit_code)
"""


def until_started(told: Path, process: int) -> None:
    while not (told / "started").exists():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before it began"


def test_sighup_ends_the_work_in_order(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING, tmp_path], cwd=ROOT)
    until_started(tmp_path, process.pid)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 128 + signal.SIGHUP
    assert (tmp_path / "clean").read_text() == "True"


def test_a_terminal_that_is_closed_ends_the_work_in_order(tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", WAITING, str(tmp_path)])
    until_started(tmp_path, process)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "clean").read_text() == "True"


def test_nohup_stays_in_force(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, tmp_path, "nohup"]
    process = subprocess.Popen(command, cwd=ROOT)
    until_started(tmp_path, process.pid)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert process.wait(120) == 0
    assert not (tmp_path / "clean").exists()


@pytest.mark.parametrize("module", ["typer", "earl_core.config", "flows.cli.training"])
def test_ctrl_c_during_the_imports(module: str) -> None:
    code = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["earl", "train", "gone.yaml"]
from flows.cli import main
main()
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 130, shown.stderr
    assert shown.stderr == "Stopped.\n"

"""What a killed session of tests has left in shared memory goes at the start of the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.shared import memory_place, sweep_memory


def test_places_of_dead_processes_go_and_nothing_else(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = memory_place("cli", sleeper.pid).name
    sleeper.kill()
    sleeper.wait()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    memory = tmp_path / "memory"
    others = [memory_place("cli").name, "earl-tests-cli-1", "earl-0", f"copy-{dead}"]
    for name in (dead, *others):
        (memory / name).mkdir(parents=True)
        (memory / name / "file").touch()
    (memory / f"{dead}-link").symlink_to(elsewhere)
    sweep_memory(memory)
    assert sorted(os.listdir(memory)) == sorted([*others, f"{dead}-link"])
    assert (elsewhere / "kept").is_file()

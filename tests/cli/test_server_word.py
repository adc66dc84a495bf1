"""A server's word against the run directory's."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.conftest import CONFIG, Earl


def test_a_run_is_over_when_its_directory_says_so(earl: Earl) -> None:
    # As with a server that takes every state for a finished one.
    program = (
        "import flows.running; flows.running.run_flow = lambda *_, **__: {}; "
        "from flows.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(CONFIG), "--name", "unfinished", "--plain"],
        cwd=earl.directory,
        env=earl.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "unfinished says that it is not: continue with earl resume" in done.stderr
    assert "Traceback" not in done.stderr

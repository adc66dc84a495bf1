"""Runs the `train` flow as a process of its own, so that tests can kill it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from flows.train import train

if __name__ == "__main__":
    if group := os.environ.get("EARL_TEST_CGROUP"):
        # Its worker processes will be in it too.
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    config, *overrides = sys.argv[1:]
    print(asyncio.run(train(config=config, overrides=overrides)))

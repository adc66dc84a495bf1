"""Runs the `train` flow as a process of its own, so that tests can kill it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from flows.train import train
from tests.flows.planting import decided

if __name__ == "__main__":
    if group := os.environ.get("EARL_TEST_CGROUP"):
        # Its worker processes will be in it too.
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    config, *overrides = sys.argv[1:]
    with decided(json.loads(os.environ.get("EARL_TEST_DECISIONS", "[]"))):
        print(asyncio.run(train(config=config, overrides=overrides)))

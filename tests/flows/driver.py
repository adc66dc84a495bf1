"""Runs the `train` flow as a process of its own, so that tests can kill it."""

from __future__ import annotations

import asyncio
import sys

from flows.train import train

if __name__ == "__main__":
    config, *overrides = sys.argv[1:]
    print(asyncio.run(train(config=config, overrides=overrides)))

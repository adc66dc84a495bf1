"""`python -m tests.flows.one_core ARGUMENTS`: `earl ARGUMENTS` on one core."""

from __future__ import annotations

import os

from flows.cli import main

if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main()

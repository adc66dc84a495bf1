"""Load of the flow's machine while a run works: samples in the run's `system.jsonl`.

MLflow's own monitor ends with the first request that fails, and sends without a deadline; here the
run directory is the queue, as for everything else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import psutil

from earl_core.run.record import Journal, read_lines
from earl_core.system.errors import ConfigError
from earl_core.system.gpus import gpu_loads
from earl_core.system.memory import memory_in_use, tree_private_bytes

logger = logging.getLogger("earl.tracking")

_FIRST_SECONDS, _LATER_SECONDS = 10.0, 60.0
_OFTEN_SECONDS = 3600.0
"""So long it samples often; a run of weeks must not fill its directory."""


def system_samples(run_directory: Path) -> list[dict[str, float]]:
    """The samples of all attempts, oldest first: `time` in Unix seconds, and the measurements that
    the metric catalogue describes."""
    return read_lines(run_directory / "system.jsonl")


class SystemMonitor:
    """Samples at once and from then on, in a thread of its own, until `close`. It never raises."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._journal = Journal(run_directory / "system.jsonl")
        self._ended = threading.Event()
        self._gpus = True
        threading.Thread(target=self._work, name="earl-system", daemon=True).start()

    def close(self) -> None:
        """Take no more samples; returns at once."""
        self._ended.set()

    def _work(self) -> None:
        started = time.monotonic()
        psutil.cpu_percent()  # its next call says what the load has been since
        wait = 0.5
        while not self._ended.wait(wait):
            try:
                sample = {"time": time.time(), **self._sample()}
                if not self._ended.is_set():
                    self._journal.append(sample)
            except (OSError, psutil.Error, ValueError) as error:
                logger.info("the machine's load is not recorded: %s", error)
            often = time.monotonic() - started < _OFTEN_SECONDS
            wait = _FIRST_SECONDS if often else _LATER_SECONDS

    def _sample(self) -> dict[str, float]:
        found = {
            "system/cpu": psutil.cpu_percent(),
            "system/memory": float(memory_in_use()),
            "system/memory_of_run": float(tree_private_bytes(os.getpid())),
            "system/disk_free": float(psutil.disk_usage(str(self._directory)).free),
        }
        return found | (self._gpu_sample() if self._gpus else {})

    def _gpu_sample(self) -> dict[str, float]:
        """Sample all GPUs of this machine; a part that the driver does not know is left out."""
        try:
            loads = gpu_loads()
        except ConfigError as error:
            logger.info("the load of the GPUs is not recorded: %s", error)
            self._gpus = False
            return {}
        return {
            f"system/gpu_{gpu.number}_{part}": value
            for gpu in loads
            for part in ("load", "memory", "power")
            if (value := getattr(gpu, part)) is not None
        }

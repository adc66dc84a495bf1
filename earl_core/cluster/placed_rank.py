"""The first step of a rank: it settles in the place that its group was given."""

from __future__ import annotations

import os
import sys
from typing import Any

from earl_core.cluster.rank_process import WorkerContext
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import load_object
from earl_core.system.plural import plural


def build(
    context: WorkerContext,
    deployment: dict[str, Any],
    *,
    target: str,
    assignments: list[dict[str, list[int]]],
    gpus_of_host: int,
    arguments: dict[str, Any],
) -> Any:
    """A worker group's target that settles in its place first, then builds the real `target`.

    assignments: the dumped `Assignment` of each rank. gpus_of_host: as it was read; torch must not
    contradict. Threads and processes that the target starts inherit the cores. Devices are counted
    among those that CUDA_VISIBLE_DEVICES left visible.
    """
    cores, gpus = (assignments[context.rank][name] for name in ("cores", "gpus"))
    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in gpus)
    load = load_object(target)
    # To count its devices CUDA starts, after which no process can be forked that uses it, and an
    # engine may fork: there a GPU that torch does not see shows by itself.
    if not (gpus_of_host and (not gpus or deployment.get("stage") == "rollout")):
        _check_gpus(gpus_of_host)
    return load(context, deployment, **arguments)


def _check_gpus(gpus_of_host: int) -> None:
    """Raise `ConfigError` where torch, if the target has imported it, sees a GPU that was not read,
    or none in place of one: all sizes were planned for the other device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    found = bool(torch.cuda.is_available())
    if found and not gpus_of_host:
        raise ConfigError(
            "torch sees a GPU, and the run was planned for a CPU, because no NVIDIA driver told of "
            "one",
            remedy="see `earl doctor`, or export CUDA_VISIBLE_DEVICES= to work on the CPU alone",
        )
    if not found and gpus_of_host:
        raise ConfigError(
            f"the run was planned for {plural(gpus_of_host, 'GPU')} on this host, and torch "
            f"{torch.__version__} sees none",
            remedy="see `earl doctor`: the driver may be too old for torch's CUDA, or torch a "
            "build for CPUs",
        )

"""Ranks of one world as processes that part after their imports; each answers in JSON."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_core.cluster.host import bind_listener, meeting_variables, rank_variables
from earl_core.cluster.supervisor import LISTENER
from tests import warm

REPOSITORY = Path(__file__).resolve().parents[2]


def launch(
    module: str, function: str, ranks: int, scratch: Path, timeout_seconds: float = 240.0
) -> list[Any]:
    """Call `module.function(scratch)` in each rank; what each returned, by rank.

    A rank that fails or does not end in time fails the caller with the ranks' output; none is left
    behind.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    arguments = [module, function, str(scratch), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parent = warm.start(__name__, arguments, environment, REPOSITORY, 2, warm.LEARNER)
    try:
        failed = parent.wait(timeout_seconds) != 0
    except subprocess.TimeoutExpired:
        failed = True
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
    if failed:
        logs = (f"--- {path.name}\n{path.read_text()[-3000:]}" for path in scratch.glob("*.log"))
        raise AssertionError(f"{function} failed or hung\n" + "\n".join(sorted(logs)))
    return [json.loads((scratch / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _main() -> None:
    module, function, scratch, ranks = sys.argv[1:]
    call: Callable[[Path], Any] = getattr(importlib.import_module(module), function)
    with bind_listener() as listener:
        os.environ.update(meeting_variables(*listener.getsockname()))
        children = []
        for rank in range(int(ranks)):
            own = rank_variables(rank, [""] * int(ranks))
            children.append(_rank(own, call, Path(scratch), listener))
    for _ in children:
        _, status = os.wait()
        if status:
            # The others wait for it in vain.
            os.killpg(0, signal.SIGKILL)


def _rank(
    own: dict[str, str], call: Callable[[Path], Any], scratch: Path, listener: socket.socket
) -> int:
    child = os.fork()
    if child:
        return child
    rank = int(own["RANK"])
    log = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(own)
    if rank == 0:
        os.environ[LISTENER] = str(listener.detach())
    listener.close()
    try:
        result = call(scratch)
        (scratch / f"rank{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _main()

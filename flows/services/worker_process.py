"""The process of the worker: Prefect's, which ends with its server.

Prefect's worker executes what its server answers, and asks for as long as it lives: with the server
gone there is nobody whom it may ask. Its flow runs could report to nobody either, so that they end
too, as at a cancellation; they can be resumed.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
import threading

from earl_core.system.processes import ProcessId, descendants, end_processes
from flows.services.process import END_SECONDS


def end_with(server: ProcessId) -> None:
    """End this process with the server from now on, and all that was started here before that."""
    # A descriptor of the process: whoever has its number later is another one.
    try:
        descriptor = os.pidfd_open(server.pid)
    except ProcessLookupError:
        sys.exit("the server has ended")
    if not server.alive():
        sys.exit("the server has ended")

    def watch() -> None:
        select.select([descriptor], [], [])
        print("The worker ends, because its server has ended.", file=sys.stderr, flush=True)
        end_processes(lambda: descendants(os.getpid()), END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="server-watch", daemon=True).start()


if __name__ == "__main__":
    _server = ProcessId.parse(sys.argv.pop(1))
    if _server is not None:
        end_with(_server)
    from tasks.result_security import ask_first_listeners

    ask_first_listeners()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)

"""The process that copies shards to the spill and back, so that no other touches their bytes.

Run as `python -m earl_core.dispatch.spill.process URL UID DIRECTORY`. Requests are JSON lines on
standard input, answered in order on standard output: `{"id", "do", ...}` → `{"id", "error"}`, where
`error` is null or `[kind, message]`. It ends when standard input does, even during a copy.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.spill.storage import Spill, SpillError

_NICE = 10  # the stages come first


def _answer(
    spill: Callable[[], Spill], directory: Path, request: dict[str, Any]
) -> list[str] | None:
    """Do one request; the error as (kind, message), or None."""
    try:
        what = request["do"]
        if what == "delete":
            spill().delete(request["files"])
        elif what == "remove":
            spill().remove()
        else:
            entry = ShardEntry.model_validate(request["entry"])
            path = directory / entry.file
            if what == "put":
                spill().put(path, entry)
            else:
                spill().restore(entry, path)
    except SpillError as error:
        return ["spill", str(error)]
    except ManifestError as error:
        return ["lost", str(error)]
    except OSError as error:
        return ["spill", f"{directory} cannot be used: {error}"]
    return None


def _read_requests(into: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        into.put(json.loads(line))
    # The controller is gone: what is half copied counts as not copied.
    os._exit(0)


def main(url: str, uid: str, directory: str) -> None:
    """Serve requests until standard input ends."""
    os.nice(_NICE)
    # Ctrl-C reaches the whole group; the controller decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    # Opened late, so that a missing package is the answer to a request.
    spill = cache(lambda: Spill(url, uid))
    while True:
        request = requests.get()
        error = _answer(spill, Path(directory), request)
        sys.stdout.write(json.dumps({"id": request["id"], "error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The controller's end of the spill: what is to be copied, what lags behind, what is left over.

`submit` costs a few microseconds. The bytes go through a process of its own
(`earl_core.dispatch.spill.process`), never through the controller. A shard that cannot be spilled
is still in shared memory, counts as lagging, and is tried again with the next one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_core.dispatch.segments.pool_directory import is_uid
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.spill.storage import SpillError
from earl_core.system.processes import child_path

logger = logging.getLogger(__name__)

_Request = dict[str, Any]


class Spiller:
    """One run's spill. Any thread may call it; the copying process starts with the first request.

    Between requests nothing is promised about order but this: a shard is deleted after it was
    copied, never before.
    """

    def __init__(self, url: str, uid: str, directory: Path) -> None:
        if not is_uid(uid):
            raise ValueError(f"{uid!r} is no uid of a run, so it names no folder of a spill")
        self._arguments = [url, uid, str(directory)]
        self.url = url
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._sent: dict[int, _Request] = {}
        self._failed: dict[str, _Request] = {}
        self._answers: dict[int, list[str] | None] = {}
        self._next = 0
        self._spilled_bytes = 0
        self._warned = False

    @property
    def lag_bytes(self) -> int:
        """Bytes of shards that the spill does not hold yet, failed ones included."""
        with self._changed:
            return sum(_size(request) for request in [*self._sent.values(), *self._failed.values()])

    @property
    def spilled_bytes(self) -> int:
        """Bytes of shards that were copied, or needed no copy, since this object was made."""
        with self._changed:
            return self._spilled_bytes

    def submit(self, entries: Sequence[ShardEntry]) -> None:
        """Have published shards copied in the background; those that failed before, too."""
        with self._changed:
            again = list(self._failed.values())
            self._failed.clear()
            fresh = [{"do": "put", "entry": entry.model_dump(mode="json")} for entry in entries]
            for request in [*again, *fresh]:
                self._send(request)

    def release(self, files: Sequence[str]) -> None:
        """Have shards that nobody needs any more removed from the spill."""
        if not files:
            return
        with self._changed:
            for file in files:
                self._failed.pop(file, None)
            self._send({"do": "delete", "files": list(files)})

    def restore(self, entry: ShardEntry, timeout_seconds: float = 600.0) -> None:
        """Copy a shard back into shared memory and wait for it.

        Raises `ManifestError` when the spill has no whole copy, `SpillError` when it cannot be
        read or is slower than the timeout.
        """
        with self._changed:
            number = self._send({"do": "restore", "entry": entry.model_dump(mode="json")})
        self._wait(number, timeout_seconds, f"the shard {entry.file} did not come back")

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything submitted was tried; whether the spill now holds it all."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._sent and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._sent and not self._failed

    def remove(self, timeout_seconds: float = 60.0) -> None:
        """Remove the run's folder from the spill: the run is finished. Failing is a warning."""
        with self._changed:
            self._failed.clear()
            number = self._send({"do": "remove"})
        try:
            self._wait(number, timeout_seconds, "its shards were not removed in time")
        except SpillError as error:
            logger.warning("the run's spill must be removed by hand: %s", error)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Let copies under way finish, up to the timeout; warn of what the spill lacks."""
        if not self.drain(timeout_seconds):
            logger.warning(
                "%s bytes of shards are not in the spill %s: until a resume they are in shared "
                "memory only",
                f"{self.lag_bytes:,}",
                self.url,
            )
        with self._changed:
            process, self._process = self._process, None
            self._sent.clear()
        if process is not None:
            process.kill()
            process.wait()
            if self._listener is not None:
                self._listener.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _send(self, request: _Request) -> int:
        self._next += 1
        number, self._sent[self._next] = self._next, request
        if self._process is None:
            self._start()
        self._write({**request, "id": number})
        return number

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "earl_core.dispatch.spill.process", *self._arguments],
            env={**os.environ, "PYTHONPATH": child_path(os.environ)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._listener = threading.Thread(
            target=self._listen, args=(self._process,), name="spill", daemon=True
        )
        self._listener.start()

    def _write(self, request: _Request) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # the listener sees the end of the process and fails what was sent

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._changed:
                self._take(answer["id"], answer["error"])
        with self._changed:
            if self._process is not process:
                return
            self._process = None
            for number in list(self._sent):
                self._take(number, ["spill", "the process that spills shards has ended"])

    def _take(self, number: int, error: list[str] | None) -> None:
        request = self._sent.pop(number, None)
        if request is None:
            return
        if request["do"] in ("restore", "remove"):
            self._answers[number] = error
        elif error is None:
            self._spilled_bytes += _size(request)
            self._warned = self._warned and bool(self._failed)
        else:
            if request["do"] == "put":
                self._failed[request["entry"]["file"]] = request
            if not self._warned:
                # One warning for a whole outage; the metric of what lags tells the rest.
                self._warned = True
                logger.warning("%s. Shards stay in shared memory; nothing is lost", error[1])
        self._changed.notify_all()

    def _wait(self, number: int, timeout_seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while number not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SpillError(f"{otherwise} within {timeout_seconds:g} s from {self.url}")
                self._changed.wait(left)
            error = self._answers.pop(number)
        if error is not None:
            kind, message = error
            raise ManifestError(message) if kind == "lost" else SpillError(message)


def _size(request: _Request) -> int:
    return int(request["entry"]["bytes"]) if request["do"] == "put" else 0

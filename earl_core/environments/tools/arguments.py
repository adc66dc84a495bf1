"""Check of arguments against a tool's schema, bounded in time, because it comes from anywhere.

A pattern that backtracks and references that multiply keep a thread for ever, and with it the
whole interpreter. So schemas that have any are tried in a process of their own, which is ended when
it takes too long; the next call begins another.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from earl_core.system.errors import EarlError

SECONDS = 5.0
"""Seconds of one check, after the process has started."""

_START_SECONDS = 60.0
_COSTLY = (
    *("pattern", "patternProperties", "$ref", "$dynamicRef", "$recursiveRef"),
    # Objects are compared each with each.
    "uniqueItems",
)
_PROGRAM = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); sys.path[:] = {path!r}; "
    "from earl_core.environments.tools.arguments import serve; serve()"
)


def misfit(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return the reason why a schema refuses the arguments, "" when it does not."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing import Registry

    # A registry of its own: references in the schema of a server are not fetched from the net.
    validator = Draft202012Validator(parameters, registry=Registry())
    try:
        found = best_match(validator.iter_errors(arguments))
    except RecursionError:
        return "the schema refers to itself without an end"
    if found is None:
        return ""
    where = "".join(f" of {part}" for part in reversed(found.absolute_path))
    return f"{found.message}{where}"


class ArgumentCheck:
    """Runs `misfit` in a process of its own; for threads."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def misfit(self, name: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """Call the function `misfit` in the process. name: of the tool. Raises `EarlError` when it
        takes too long."""
        question = json.dumps([parameters, arguments]).encode() + b"\n"
        with self._turn:
            # The kernel ends the process with the thread that began it, which may be gone.
            said = self._asked(name, question) or self._asked(name, question)
            if not said:
                raise EarlError(f"the process that compares arguments of {name} ended twice")
        return str(json.loads(said))

    def _asked(self, name: str, question: bytes) -> bytes:
        """The answer, empty when the process has ended. Raises `EarlError` when it takes long."""
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.write(question)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], SECONDS)[0]:
                self._end(process)
                raise EarlError(
                    f"{name} has a schema that takes over {SECONDS:g} s to compare with these "
                    "arguments: give it others"
                )
            said = process.stdout.readline()
            if said.endswith(b"\n"):  # else it ended while it answered
                return said
        self._end(process)
        return b""

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # to close one writes what it still holds
                pipe.close()  # type: ignore[union-attr]

    def _started(self) -> subprocess.Popen[bytes]:
        program = _PROGRAM.format(path=sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], _START_SECONDS)[0]:
            self._end(process)
            raise EarlError("the process that compares arguments with schemas did not start")
        process.stdout.readline()
        self._process = process
        return process


def is_costly(schema: Any) -> bool:
    """Tell whether a schema has a part that may take any time."""
    if isinstance(schema, Mapping):
        return any(key in _COSTLY or is_costly(each) for key, each in schema.items())
    return isinstance(schema, list) and any(map(is_costly, schema))


def serve() -> None:
    """Answer questions until there are none."""
    misfit({}, {})
    print(flush=True)
    for line in sys.stdin:
        try:
            said = misfit(*json.loads(line))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)

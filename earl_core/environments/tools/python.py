"""Python code as a tool: each call in a fresh process with limits.

Contained: processor time, wall time, memory, the size and number of files, the environment's
variables, the network (a namespace without one), and processes that the code leaves behind unless
they begin a session of their own. Not contained: the code runs as the same user, reads what that
user may read and writes where the user may write; its own folder is only its working directory. It
is a guard against accidents of a model, not against an attacker: where that matters run EARL in a
container, or name a tool of your own that asks a sandbox.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from earl_core.system.errors import ConfigError

_SECONDS = 8
_OUTPUT_BYTES = 1 << 17
_NO_NETWORK = 126
# Limits are set by the process itself: code between fork and exec of a process with threads may
# wait for a lock that nobody holds any more.
_PRELUDE = f"""
import ctypes, os, resource, sys
libc = ctypes.CDLL(None)
libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
# CLONE_NEWNET, which only root may use alone; with CLONE_NEWUSER anybody whom the kernel lets.
if libc.unshare(0x40000000) and libc.unshare(0x50000000):
    os._exit({_NO_NETWORK})
limits = dict(CPU={_SECONDS}, AS=1 << 30, FSIZE=1 << 24, NOFILE=64, CORE=0)
for kind, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
code = sys.stdin.read()
exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
"""
_COMMAND = (sys.executable, "-I", "-X", "utf8", "-c", _PRELUDE)


async def python(code: str) -> str:
    """Runs Python code in a fresh process and returns what it printed.

    Args:
        code: The code. Print what you want to see. Nothing is kept between calls.
    """
    with tempfile.TemporaryDirectory(prefix="earl-python-") as folder:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = await asyncio.wait_for(_output(process, code), _SECONDS)
        except TimeoutError:
            return f"Error: the code ran for over {_SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return output.decode("utf-8", "replace") or "(nothing was printed)"


async def _output(process: asyncio.subprocess.Process, code: str) -> bytes:
    """What it printed, until it ends or has printed too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ConnectionError):
        process.stdin.write(code.encode("utf-8", "replace"))
        await process.stdin.drain()
        process.stdin.close()
    parts, size = [], 0
    while size < _OUTPUT_BYTES and (part := await process.stdout.read(_OUTPUT_BYTES)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _environment(folder: str) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}


def _check() -> None:
    """Raise `ConfigError` where no process can be cut off the network."""
    probe = subprocess.run(
        _COMMAND, input=b"", env=_environment("/"), capture_output=True, check=False
    )
    if probe.returncode:
        raise ConfigError(
            f"the tool 'python' does not run here ({probe.stderr.decode()[-300:]!r}): it needs to "
            "cut its processes off the network",
            remedy="allow user namespaces, or name a tool of your own that runs code elsewhere",
        )


python.check = _check  # type: ignore[attr-defined]

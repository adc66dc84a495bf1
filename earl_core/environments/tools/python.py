"""Python code as a tool: each call in a fresh process that is held by the kernel.

`sandbox` does it. Namespaces are taken where the kernel gives some: the code then sees no process,
no network and no file but Python's own, and a folder in memory; filters of system calls and, in
place of the mount view, Landlock otherwise. Loading the tool names limits that do not hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from earl_core.environments.tools.sandbox.groups import limited_groups, sweep
from earl_core.environments.tools.sandbox.program import Settings
from earl_core.system.errors import ConfigError
from earl_core.system.removal import remove_tree

_SECONDS = 8
_MEMORY_BYTES = 1 << 30
_PROCESSES = 64
_OUTPUT_BYTES = 1 << 17
_END_SECONDS = 2.0
# A folder, or the file that a host of another interpreter is run from.
_HOME = str(Path(__file__).resolve().parents[3])
_START = f"""\
import sys
sys.path.append({_HOME!r})
from earl_core.environments.tools.sandbox.program import main
sys.path.remove({_HOME!r})
main()
"""
_COMMAND = (sys.executable, "-I", "-B", "-X", "utf8", "-c", _START)
# One thread each: libraries begin one for every core, which are more than the code may have.
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
_VARIABLES = {"PATH": os.defpath, **{f"{library}_NUM_THREADS": "1" for library in _THREADS}}


async def python(code: str) -> str:
    """Runs Python code in a fresh process and returns what it printed.

    Args:
        code: The code. Print what you want to see. Nothing is kept between calls.
    """
    with _settings(namespaces=_containment()[0]) as settings:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            settings.text(),
            cwd="/",
            env=_VARIABLES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = await asyncio.wait_for(_output(process, code), _SECONDS + _END_SECONDS)
        except TimeoutError:
            return f"Error: the code ran for over {_SECONDS} s"
        finally:
            await _end(process)
    return output.decode("utf-8", "replace") or "(nothing was printed)"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process, which ends what the code began before it ends itself."""
    # Not by its method, which waits for it too, as the event loop does.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _output(process: asyncio.subprocess.Process, code: str) -> bytes:
    """Read the output of the process, until it ends or has printed too much."""
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


@contextmanager
def _settings(namespaces: bool, tell: bool = False) -> Iterator[Settings]:
    with ExitStack() as stack:
        groups = stack.enter_context(limited_groups(_MEMORY_BYTES, _PROCESSES))
        folder = tempfile.mkdtemp(prefix="earl-python-")
        stack.callback(remove_tree, folder)
        yield Settings(namespaces, folder, groups, _SECONDS, _MEMORY_BYTES, _PROCESSES, tell)


@cache
def _containment() -> tuple[bool, list[str]]:
    """Tell whether there are namespaces, and which limits do not hold. Raises `ConfigError`."""
    sweep()
    reasons: list[str] = []
    for namespaces in (True, False):
        with _settings(namespaces, tell=True) as settings:
            probe = subprocess.run(
                (*_COMMAND, settings.text()),
                input=b"import decimal; print(decimal.Decimal(1))",
                env=_VARIABLES,
                cwd="/",
                capture_output=True,
                check=False,
            )
        told = probe.stdout.decode().splitlines()
        if probe.returncode == 0 and told[1:] == ["1"]:
            lacking: list[str] = json.loads(told[0])
            if reasons:
                lacking.append(f"it has no namespaces: {reasons[0]}")
            return namespaces, lacking
        said = probe.stderr.decode(errors="replace").strip().splitlines() or told
        reasons.append(said[-1][-300:] if said else f"exit code {probe.returncode}")
    raise ConfigError(
        f"the tool 'python' does not run here ({'; '.join(reasons)}): it needs to cut its "
        "processes off the network",
        remedy="allow user namespaces, or name a tool of your own that runs code elsewhere",
    )


def _check() -> list[str]:
    """List the limits that do not hold here. Raises `ConfigError` where the tool cannot run."""
    return [f"the tool 'python' is not wholly contained here: {each}" for each in _containment()[1]]


python.check = _check  # type: ignore[attr-defined]

"""A program of an episode: started, read and, whatever happens, ended with its process group.

Standard library only, because hosts run under Pythons that have nothing else of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from earl_core.system.last_words import LastWords

PRINTED_CHARACTERS = 2**16
_ERROR_CHARACTERS = 2000
_PIPE_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """A program that has ended: its exit code, or less a signal's number, and the ends of what it
    printed and wrote to standard error."""

    code: int
    printed: str
    errors: str

    def __str__(self) -> str:
        told = f"exit code {self.code}" if self.code > 0 else f"signal {-self.code}"
        return f"{told}: {self.errors or self.printed}"


async def run_program(
    command: Sequence[str], given: str, variables: Mapping[str, str], ends_whole: bool = False
) -> Ended:
    """Run a command to its end. Cancelled, it kills the program's group. given: its standard input.
    variables: all that it has. ends_whole: whether SIGTERM ends it, and before that all it began,
    what has left its group too."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(variables),
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    printed, errors = LastWords(PRINTED_CHARACTERS), LastWords(_ERROR_CHARACTERS, _log)
    reading = [
        asyncio.create_task(printed.read(process.stdout)),
        asyncio.create_task(errors.read(process.stderr)),
    ]
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(given.encode())
            await process.stdin.drain()
            process.stdin.close()
        # `process.wait` waits for the pipes, too, which a child of the program may hold.
        while process.returncode is None:
            await asyncio.sleep(_LOOK_SECONDS)
        _end_group(process.pid)
        # A process that has left the group may hold the pipes.
        await asyncio.wait(reading, timeout=_PIPE_SECONDS)
        return Ended(process.returncode, printed.text, errors.text)
    finally:
        if ends_whole:
            await _end_whole(process)
        _end_group(process.pid)
        for each in reading:
            each.cancel()


def policy_variables(policy: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which clients find the policy. policy: its `base_url`, `api_key`."""
    url, key = policy["base_url"], policy["api_key"]
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        # Anthropic's clients add /v1.
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


async def _end_whole(process: asyncio.subprocess.Process) -> None:
    over = time.monotonic() + _END_SECONDS
    while process.returncode is None and time.monotonic() < over:
        # Again, because it may not have been listening yet.
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.sleep(_LOOK_SECONDS)


def _end_group(group: int) -> None:
    """Kill what is left of the program and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _log(text: str) -> None:
    sys.stderr.write(text)

"""Blocking functions for asyncio, each in a thread of its own, cancelled by an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(
    function: Callable[[threading.Event], T], *, name: str, wake: Callable[[], None]
) -> T:
    """Await `function(abort)`. Cancelled, it sets `abort`, calls `wake`, and waits all the same."""
    # A thread of its own, not the loop's executor: a few long calls would fill that, and its
    # threads hold up the interpreter's exit.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    abort = threading.Event()

    def run() -> None:
        try:
            value = function(abort)
        except BaseException as error:
            outcome = error if isinstance(error, Exception) else RuntimeError(repr(error))
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(future.set_exception, outcome)
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(future.set_result, value)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        abort.set()
        wake()
        while not future.done():
            # A second cancellation must not let go of a call that is still being wound up.
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        future.exception()
        raise

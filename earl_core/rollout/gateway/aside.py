"""Work on large requests, beside the event loop that answers everybody.

One thread does it, one request after the other, with a tokenizer of its own: encoding changes a
tokenizer's state, so that two threads must not share one.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.system.errors import EarlError

LARGE = 2**15
"""Characters, or bytes, from which on a request is large: fewer take milliseconds."""

_PIECE = 2**16

T = TypeVar("T")


class TooManyTokens(EarlError):
    """A conversation that no context of the model can hold."""


class Aside:
    """The thread of one gateway. chat: the tokenizer that it copies when it is first needed."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._source = chat
        self._own: ChatTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large requests")

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in the thread; returns or raises what it does. When this is cancelled,
        it is not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def chat(self) -> ChatTokenizer:
        """The thread's own tokenizer."""
        if self._own is None:
            self._own = await self.run(lambda: copy.deepcopy(self._source))
        return self._own

    def close(self) -> None:
        """Cancel the functions that wait; one under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_length(chat: ChatTokenizer, texts: Iterable[str], most: int) -> None:
    """Raise `TooManyTokens` when texts have more than `most` tokens.

    It encodes them in pieces, because a whole one takes a few hundred times its memory.
    """
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            # A piece may begin and end within a token.
            tokens += max(len(chat.encode(text[start : start + _PIECE])) - 2, 0)
            if tokens > most:
                raise TooManyTokens(f"the conversation has more than {most} tokens")

"""The environments of a host, and one call of one of them: where it runs, and its encoded reply."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from earl_core.environments.base import Environment, EnvironmentFailed, Message, StepResult
from earl_core.environments.rewards.results import first_messages, legal_answers, step_result
from earl_core.environments.tools.episode_tools import EpisodeTools, HostTools
from earl_core.secrets import redact
from earl_core.system.frames import WireError, encode

logger = logging.getLogger(__name__)

_DETAIL_CHARACTERS = 4000
_FRAMES_SHOWN = 6


@dataclass(eq=False)
class Call:
    """A request of the pool: its kind ("reset", "step", "legal", "tools" or "close"), its number
    `call`, and the arguments of the method; of "reset" the policy's address, or None, too; of
    "tools" the assistant's message.

    seconds: how long it has run. overdue: why it was cancelled, if it was. thread,
    coroutine: in which thread its synchronous code runs now, or which coroutine; neither while it
    waits for a thread.
    """

    kind: str
    episode: int
    call: int = -1
    arguments: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    overdue: str = ""
    thread: int | None = None
    coroutine: Any = None

    @property
    def running(self) -> bool:
        """True while its code runs, as opposed to waiting for a thread."""
        return self.thread is not None or self.coroutine is not None

    @property
    def cancellable(self) -> bool:
        """True while a coroutine runs; a tool's plain function in a thread cannot be stopped."""
        return self.coroutine is not None and self.thread is None

    def stack(self) -> str:
        """Return the stack of its code, the innermost frame last."""
        if not self.cancellable:
            frame = sys._current_frames().get(self.thread or 0)
            return "".join(traceback.format_stack(frame)[-_FRAMES_SHOWN:]) if frame else ""
        lines, coroutine = [], self.coroutine
        while frame := getattr(coroutine, "cr_frame", None):
            lines += traceback.format_stack(frame, limit=1)
            coroutine = coroutine.cr_await
        return "".join(lines[-_FRAMES_SHOWN:])


class Calls:
    """The environments of one host, by episode.

    create: makes a fresh environment, in a thread. threads: run what is not a coroutine function.
    tools: what the model may call.
    """

    passing: tuple[type[BaseException], ...] = ()
    """Exceptions that are raised on, because they are no failure of the environment."""

    def __init__(
        self, create: Callable[[], Environment], threads: Executor, tools: HostTools
    ) -> None:
        self._create = create
        self._tools = tools
        self._threads = threads
        self._environments: dict[int, Environment] = {}
        self._episode_tools: dict[int, EpisodeTools] = {}
        self._outcomes: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._waking = False

    def episodes(self) -> list[int]:
        """The episodes that are open."""
        return list(self._environments)

    async def run(self, call: Call) -> bytes | None:
        """Runs a call and returns its encoded reply, None for "close". Whatever the environment
        raises, SystemExit included, becomes a "failed" reply."""
        try:
            if call.kind == "close":
                await self._close(call)
                return None
            environment: Any
            if call.kind == "reset":
                environment = await self._in_thread(call, self._create)
                self._environments[call.episode] = environment
                prompt, seed, policy = call.arguments
                if getattr(environment, "wants_policy", False):
                    environment.policy = policy
                value = first_messages(await self._invoke(call, environment.reset, prompt, seed))
            elif call.kind == "legal":
                value = legal_answers(await self._legal(call))
            elif call.kind == "tools":
                value = step_result(await self._use_tools(call, *call.arguments))
            else:
                environment = self._environments[call.episode]
                value = step_result(await self._invoke(call, environment.step, *call.arguments))
            return encode({"kind": "answer", "call": call.call, "value": value})
        except WireError as error:
            reason, detail = "invalid_result", str(error)
        except EnvironmentFailed as error:
            reason, detail = error.reason, error.detail
            if call.overdue:
                reason, detail = "timeout", f"{call.overdue}: {detail}"
        except self.passing:
            raise
        except BaseException as error:
            # Exceptions of the user's own too: whoever waits for the reply must get one.
            reason = "timeout" if call.overdue else "exception"
            told = traceback.format_exception(error)
            if call.overdue and isinstance(error, asyncio.CancelledError):
                told.pop()  # it is the deadline's, which is told already
            detail = f"{call.overdue}\n{''.join(told)}".lstrip()
        await self._close(call)
        return failure(call, reason, detail)

    async def _legal(self, call: Call) -> Any:
        method = getattr(self._environments[call.episode], "legal_answers", None)
        return [] if method is None else await self._invoke(call, method)

    async def _use_tools(self, call: Call, message: Message) -> StepResult:
        environment: Any = self._environments[call.episode]
        if call.episode not in self._episode_tools:
            self._episode_tools[call.episode] = self._tools.of_episode(environment)
        toolbox, calls = self._episode_tools[call.episode].toolbox, message["tool_calls"]
        # Its time is not that of a step: many episodes' servers may be starting.
        await toolbox.ready(calls)
        in_thread = partial(self._in_thread, call)
        result: StepResult = await self._invoke(call, toolbox.use, calls, in_thread)
        if told := getattr(environment, "tools_used", None):
            await self._invoke(call, told, [message, *result.messages])
        return result

    async def _invoke(self, call: Call, method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            result = method(*arguments)
        else:
            result = await self._in_thread(call, method, *arguments)
        if not inspect.isawaitable(result):
            return result
        call.coroutine = result
        try:
            return await result
        finally:
            call.coroutine = None

    async def _in_thread(self, call: Call, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def body() -> None:
            call.thread = threading.get_ident()
            try:
                outcome = future.set_result, function(*arguments)
            except (StopIteration, GeneratorExit) as error:
                # No future can hold the one; the other would close who waits for it.
                held = RuntimeError(f"it raised {error!r}")
                held.__cause__ = error
                outcome = future.set_exception, held
            except BaseException as error:
                outcome = future.set_exception, error
            call.thread = None
            self._outcomes.append(outcome)
            # Waking the loop costs more than most calls do, so it is done once for many.
            if not self._waking:
                self._waking = True
                loop.call_soon_threadsafe(self._deliver)

        self._threads.submit(body)
        return await future

    def _deliver(self) -> None:
        self._waking = False
        while self._outcomes:
            deliver, value = self._outcomes.popleft()
            deliver(value)

    async def _close(self, call: Call) -> None:
        environment = self._environments.pop(call.episode, None)
        if environment is not None:
            try:
                await self._invoke(call, environment.close)
            except self.passing:
                raise
            except BaseException:
                logger.warning("close() of an environment raised", exc_info=True)
        if tools := self._episode_tools.pop(call.episode, None):
            await tools.close()


def failure(call: Call, reason: str, detail: str, *, stuck: bool = False) -> bytes:
    """An encoded "failed" reply with the end of `detail`. stuck: the call still runs."""
    # Whoever prints it must be able to, also where the environment raised what is no UTF-8.
    printable = redact(detail.encode("utf-8", "backslashreplace").decode())
    return encode(
        {
            "kind": "failed",
            "call": call.call,
            "reason": reason,
            "detail": printable[-_DETAIL_CHARACTERS:],
            "stuck": stuck,
        }
    )

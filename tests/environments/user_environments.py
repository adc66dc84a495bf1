"""Environments as a user might write them, good and bad. Imported by name in host processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from earl_core.environments.base import Message, StepResult

SPEECHLESS = 10**6
"""The prompt of an episode that begins without a message."""

UNUSABLE: dict[str, Any] = {
    "infinite": StepResult([], float("inf"), True),
    "huge": StepResult([], 1e300, True),
    "unending": StepResult([], 10**10_000, True),
    "text_reward": StepResult([], "1", True),  # type: ignore[arg-type]
    "surrogate": StepResult([{"role": "user", "content": "a\ud800"}], 0.0, False),
    "role": StepResult([{"role": "referee", "content": "a"}], 0.0, False),
    "calls": StepResult([{"role": "assistant", "content": "", "tool_calls": [{}]}], 0.0, False),  # type: ignore[typeddict-item]
    "no_calls": StepResult([{"role": "user", "content": "", "tool_calls": None}], 0.0, False),  # type: ignore[typeddict-item]
    "metric_text": StepResult([], 0.0, True, {"metrics": {"a": "x"}}),
    "metric_nan": StepResult([], 0.0, True, {"metrics": {"a": float("nan")}}),
    "metric_list": StepResult([], 0.0, True, {"metrics": [1.0]}),
}
"""What `Counting` returns when it is told so."""


class Own(BaseException):
    """What `except Exception` does not catch."""


RAISED: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "stop": StopIteration(),
    "own": Own(),
    "generator": GeneratorExit(),
}


class Counting:
    """Echoes the turn and a seeded number; ends after `turns`. Misbehaves when told to."""

    def __init__(self, turns: int = 5, directory: str = "") -> None:
        self.turns = turns
        self.directory = Path(directory) if directory else None
        self.count = 0
        self.random = random.Random()

    def reset(self, prompt: int, seed: int) -> list[Message]:
        if prompt == SPEECHLESS:
            return []
        self.count = 0
        self.random = random.Random(f"{prompt}/{seed}")
        self._mark("reset")
        return [{"role": "user", "content": f"prompt {prompt}"}]

    def step(self, text: str) -> StepResult:
        self.count += 1
        command, _, argument = text.partition(" ")
        self._mark(command)
        result = self._obey(command, argument)
        if result is not None:
            return result
        number = self.random.randrange(10**9)
        message: Message = {"role": "user", "content": f"{self.count} {number} {text}"}
        done = self.count >= self.turns
        return StepResult([message], float(self.count), done, {"outcome": "end"} if done else {})

    def close(self) -> None:
        self._mark("close")

    def _obey(self, command: str, argument: str) -> Any:
        if command == "raise":
            raise RuntimeError(f"told to fail: {argument}")
        if command in RAISED:
            raise RAISED[command]
        if command == "sleep":
            time.sleep(float(argument))
        if command == "until":
            while not Path(argument).exists():
                time.sleep(0.01)
        if command == "nap":
            began = time.monotonic()
            time.sleep(float(argument))
            return nap(began)
        if command == "vast":
            return StepResult([{"role": "user", "content": "x" * (65 << 20)}], 0.0, False)
        if command == "keys":
            return StepResult([], 0.0, True, {"counts": {1: (2, 3)}})
        if command == "spin":
            while True:
                pass
        if command == "stubborn":
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    continue
        if command == "hold":
            # Called through PyDLL, a C function keeps the interpreter lock.
            ctypes.PyDLL(None).sleep(10_000)
        if command == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if command in ("once", "die_again"):
            path = Path(argument)
            if path.exists() and command == "die_again":
                os._exit(7)
            if path.exists():
                time.sleep(1000)
            path.touch()
        if command == "die_once":
            path = Path(argument)
            if not path.exists():
                path.touch()
                os._exit(7)
        if command in UNUSABLE:
            return UNUSABLE[command]
        if command == "numbers":
            metrics = {"a": np.float32(0.5), "b": True, "c": 3}
            return StepResult([], np.float32(0.25), True, {"metrics": metrics})  # type: ignore[arg-type]
        if command == "nan":
            return StepResult([], float("nan"), True)
        if command == "array":
            return StepResult([], 0.0, True, {"outcome": {1, 2}})
        if command == "nothing":
            return (1, 2, 3)
        return None

    def _mark(self, what: str) -> None:
        if self.directory is not None:
            with (self.directory / what).open("a") as stream:
                stream.write("x")


def nap(began: float) -> StepResult:
    """A step that says when it began and when it ended."""
    message: Message = {"role": "user", "content": "slept"}
    return StepResult([message], 0.0, False, {"began": began, "ended": time.monotonic()})


class Waiting:
    """`Counting` in coroutine functions: "wait" and "nap" wait in the event loop, "sleep" and
    "spin" keep it."""

    def __init__(self, turns: int = 5, directory: str = "") -> None:
        self._counting = Counting(turns, directory)

    async def reset(self, prompt: int, seed: int) -> list[Message]:
        return self._counting.reset(prompt, seed)

    async def step(self, text: str) -> StepResult:
        command, _, argument = text.partition(" ")
        if command == "wait":
            await asyncio.sleep(float(argument))
        if command == "nap":
            began = time.monotonic()
            await asyncio.sleep(float(argument))
            return nap(began)
        if command == "cancel":
            raise asyncio.CancelledError
        return self._counting.step(text)

    async def close(self) -> None:
        self._counting.close()


class KilledOnce(Counting):
    """Its process is killed as it is made, the first time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Serial(Counting):
    """Must not run beside another of its kind; checks that it does not."""

    concurrent = False
    running = 0

    def step(self, text: str) -> StepResult:
        cls = type(self)
        cls.running += 1
        try:
            if cls.running > 1:
                raise AssertionError("two at a time")
            time.sleep(0.001)
            return super().step(text)
        finally:
            cls.running -= 1


class Unseeded(Counting):
    """Draws from the operating system, so it cannot be rebuilt."""

    def step(self, text: str) -> StepResult:
        self.random = random.Random(os.urandom(8))
        return super().step(text)


class Echo:
    """Names its characters, and its legal answers where it is told so."""

    characters = "ab?"

    def __init__(self, knows: bool = False) -> None:
        if knows:
            self.legal_answers = lambda: ["a", "bb"]

    def reset(self, prompt: int, seed: int) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    def step(self, text: str) -> StepResult:
        return StepResult([], float(len(text)), True)

    def close(self) -> None: ...


class Failing(Echo):
    """Knows no answers, which it says in a wrong way."""

    def legal_answers(self) -> object:
        return "ab"


class Untold(Echo):
    """Names what is no text."""

    characters = 7  # type: ignore[assignment]


class Told(Unseeded):
    """Says that it cannot be rebuilt."""

    deterministic = False


class Pausing(Counting):
    """Never answers in time."""

    def __init__(self, turns: int, pause: float) -> None:
        super().__init__(turns)
        self.pause = pause

    def step(self, text: str) -> StepResult:
        time.sleep(self.pause)
        return super().step(text)


class Refusing(Echo):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no sandbox here")


class NeverReady(Echo):
    """Takes too long to be made."""

    def __init__(self) -> None:
        time.sleep(3600)


class NotAnEnvironment:
    """Lacks the methods."""


def denying_trader(game: Any, observation: str, random_source: random.Random) -> str:
    """An opponent in a negotiation that never trades."""
    return "[Deny]"


def illegal_opponent(game: Any, observation: str, random_source: random.Random) -> str:
    return "[99 99]"


WAITS_MILLISECONDS = 150
"""Of a whole episode: several times what all its calls cost on a busy machine."""


class Trying:
    """One turn; what is wrong with it is said by its option."""

    kept: ClassVar[list[Any]] = []
    made = 0

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.turns = 0
        Trying.made += 1
        if fault == "mute":
            self.legal_answers = lambda: ["one"]

    def reset(self, prompt: int, seed: int) -> list[Message]:
        if self.fault == "seeds":
            random.seed(seed)
        if self.fault == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if self.fault == "files":
            self.kept.append(open(os.devnull))  # noqa: SIM115
        if self.fault == "processes":
            self.kept.append(subprocess.Popen(["sleep", "1000"]))
        if self.fault == "memory":
            self.kept.append(bytearray(os.urandom(1 << 10)) * (2 << 10))
        shown = seed if self.fault == "start" else prompt
        return [{"role": "user", "content": f"what [now] {shown}"}]

    def step(self, text: str) -> StepResult:
        self.turns += 1
        if self.fault == "raises":
            int(text)
        if self.fault == "waits" and self.turns == 1:
            ctypes.PyDLL(None).usleep(1000 * WAITS_MILLISECONDS)
        if self.fault == "computes":
            ended = time.thread_time() + 0.02
            while time.thread_time() < ended:
                pass
        if self.fault == "sleeps" and self.turns == 1:
            time.sleep(WAITS_MILLISECONDS / 1000)
        extra = {
            "seeds": str(random.random()),
            "counts": str(Trying.made),
            "process": str(os.getpid()),
            "vast": "x" * 30_000,
        }.get(self.fault, "")
        done = self.turns == 3 and self.fault != "endless"
        reward = 0.0 if self.fault == "mute" else float(len(text))
        info = {} if self.fault == "mute" else {"outcome": "end"}
        return StepResult([{"role": "user", "content": f"more? {extra}"}], reward, done, info)

    def close(self) -> None: ...


class Held(Trying):
    """Its coroutines keep the event loop while they wait."""

    async def step(self, text: str) -> StepResult:  # type: ignore[override]
        if self.turns == 0:
            time.sleep(WAITS_MILLISECONDS / 1000)
        return super().step(text)


class Asking(Trying):
    """Plays against the policy, and counts on it."""

    wants_policy = True
    policy: dict[str, str] | None = None

    def step(self, text: str) -> StepResult:
        assert self.policy is not None
        return super().step(text)


class Named(Trying):
    """Names fewer characters than it shows."""

    characters = "what [no]1"

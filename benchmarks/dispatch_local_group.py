"""Groups of processes that run one method at a time, each saying when it began and ended."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

_ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Phase:
    """One method on all processes. start, end: of the first and of the last, `perf_counter`."""

    start: float
    end: float
    results: list[Any]

    @property
    def seconds(self) -> float:
        """From when the first began to when the last ended."""
        return self.end - self.start


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Start, end (comparable between the processes of a machine) and result."""
    start = time.perf_counter()
    result = run()
    return start, time.perf_counter(), result


def phase(answers: Sequence[tuple[float, float, Any]]) -> Phase:
    """What several processes did at the same time."""
    starts, ends, results = zip(*answers, strict=True)
    return Phase(min(starts), max(ends), list(results))


class Group:
    """`count` processes with an object `kind(rank, *arguments)` each. A context manager."""

    def __init__(self, kind: Callable[..., object], count: int, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, kind, rank, *arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        self._answers()

    def call(self, method: str, *arguments: object) -> Phase:
        """Run a method with the same arguments everywhere. Raises `RuntimeError` if one does."""
        return self.call_each(method, [arguments] * len(self._ends))

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> Phase:
        """Run a method with each process's own arguments."""
        for end, given in zip(self._ends, arguments, strict=True):
            end.send((method, given))
        return phase(self._answers())

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        numbers = {end: rank for rank, end in enumerate(self._ends)}
        while len(answers) < len(numbers):
            ready = wait([end for end, n in numbers.items() if n not in answers], _ANSWER_SECONDS)
            if not ready:
                raise RuntimeError(f"no answer within {_ANSWER_SECONDS:.0f} s")
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    good, answer = end.recv()
                except EOFError:
                    raise RuntimeError("a process of the benchmark died, see its output") from None
                if not good:
                    raise RuntimeError(f"a process of the benchmark failed:\n{answer}")
                answers[numbers[end]] = answer
        return [answers[rank] for rank in range(len(answers))]

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(end: Connection, kind: Callable[..., object], rank: int, *arguments: object) -> None:
    try:
        served = kind(rank, *arguments)
        end.send((True, None))
        while True:
            method, given = end.recv()
            function = getattr(served, method)
            end.send((True, timed(partial(function, *given))))
    except (EOFError, KeyboardInterrupt):
        return  # the benchmark ended
    except BaseException:
        end.send((False, traceback.format_exc()))

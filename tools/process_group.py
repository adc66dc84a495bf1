"""Processes of a benchmark that run one method at a time, and say when it began and ended."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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
        """Seconds from when the first began to when the last ended."""
        return self.end - self.start


class Group:
    """`count` processes with an object `kind(rank, *arguments)` each. A context manager.

    fork: they share this process's modules, and take little memory; groups that were forked after
    another end before it.
    """

    def __init__(
        self, kind: Callable[..., object], count: int, *arguments: object, fork: bool = False
    ) -> None:
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            self._ends.append(mine)
            inherited = list(self._ends) if fork else []
            process = context.Process(
                target=_serve, args=(theirs, inherited, kind, rank, *arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._answers(range(count))

    def call(self, method: str, *arguments: object) -> Phase:
        """Run a method with the same arguments everywhere. Raises `RuntimeError` if one does."""
        return self.each(method, dict.fromkeys(range(len(self._ends)), arguments))

    def each(self, method: str, arguments: Mapping[int, tuple[object, ...]]) -> Phase:
        """Run a method in these ranks, with arguments of its own in each. Raises likewise."""
        for rank, given in arguments.items():
            self._ends[rank].send((method, given))
        starts, ends, results = zip(*self._answers(arguments), strict=True)
        return Phase(min(starts), max(ends), list(results))

    def _answers(self, ranks: Iterable[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        numbers = {self._ends[rank]: rank for rank in ranks}
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
        return [answers[rank] for rank in numbers.values()]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *unused: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(
    end: Connection,
    inherited: Sequence[Connection],
    kind: Callable[..., object],
    rank: int,
    *arguments: object,
) -> None:
    # They would keep the other processes from noticing that their ends are closed.
    for other in inherited:
        other.close()
    try:
        served = kind(rank, *arguments)
        end.send((True, None))
        while True:
            method, given = end.recv()
            start = time.perf_counter()  # comparable between the processes of a machine
            result = getattr(served, method)(*given)
            end.send((True, (start, time.perf_counter(), result)))
    except (EOFError, KeyboardInterrupt):
        return  # the benchmark ended
    except BaseException:
        end.send((False, traceback.format_exc()))

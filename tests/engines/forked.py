"""vLLM's processes forked from one that has imported vLLM, which each would import anew."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

_IMPORTED_ONCE = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "earl_core.rollout.engines.vllm_worker",
]


class _Streams:
    """Standard output and error, on their way to another process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _put_in_place, (DupFd(1), DupFd(2))


def _put_in_place(*streams: Any) -> _Streams:
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.detach(), number)
    return _Streams()


class _EngineProcess(ForkServerProcess):
    """Its environment and its standard streams are those of who starts it, and not of the process
    that it is forked from."""

    def __init__(
        self, *, target: Callable[..., Any], kwargs: Mapping[str, Any], **options: Any
    ) -> None:
        given = _Streams(), dict(os.environ), target, kwargs
        super().__init__(target=_run_engine, args=given, **options)


class _Context(ForkServerContext):
    Process = _EngineProcess


def _run_engine(
    streams: _Streams,
    environment: Mapping[str, str],
    target: Callable[..., Any],
    given: Mapping[str, Any],
) -> None:
    from vllm.v1.executor import multiproc_executor

    os.environ.clear()
    os.environ.update(environment)
    fork = multiprocessing.get_context("fork")
    with patch.object(multiproc_executor, "get_mp_context", lambda: fork):
        target(**given)


@contextmanager
def forked_engines() -> Iterator[None]:
    """vLLM engines that are made inside start so, on a CPU."""
    from vllm.v1.engine import utils

    context = _Context()
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with patch.object(utils, "get_mp_context", lambda: context):
        yield

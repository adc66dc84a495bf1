"""Measure an engine's decoding under a load of synthetic sequences, and the memory it takes."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from earl_core.config import RunConfig
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.rollout.engines.engine import Engine, GenerationRequest
from earl_core.system.errors import Cancelled
from earl_core.system.memory import give_back_free_memory, guarded, private_peak_bytes, reset_peaks

_FIRST_ID = 2**61
"""Sequence ids of synthetic prompts; no episode gets that far."""


@dataclass(frozen=True)
class SyntheticLoad:
    """`requests` sequences that are half-way through decoding `generated` tokens when they have
    `context` tokens, for at least so many seconds."""

    context: int
    requests: int
    generated: int
    seconds: float

    def prompts(self, vocabulary: int, limit: int) -> list[GenerationRequest]:
        """Random tokens: no two share a beginning, and nothing ends an answer early.

        limit: most tokens of a sequence. Raises `ValueError` when the load does not fit into it.
        """
        length = min(self.context - self.generated // 2, limit - self.generated - 1)
        if min(length, self.generated, self.requests) < 1:
            raise ValueError(f"{self} cannot be measured in a context of {limit} tokens")
        tokens = np.random.default_rng(0).integers(0, vocabulary, (self.requests, length))
        return [
            # The same is decoded again and again, and would be drafted from the time before.
            GenerationRequest(
                _FIRST_ID + n, row.tolist(), self.generated, 1.0, seed=n, drafted=False
            )
            for n, row in enumerate(tokens)
        ]


async def measure_decoding(
    engine: Engine, config: RunConfig, load: SyntheticLoad, cancelled: threading.Event
) -> dict[str, float]:
    """Decode the load's answers again and again, at least twice and for its seconds.

    The prompts are read beforehand, so that only decoding is timed; an engine whose cache cannot
    hold all of them reads again, as it would in a rollout. Returns `tokens_per_second` (median of
    the passes, all sequences together), `peak_bytes` (private memory of all the engine's processes
    on a CPU, the device's on a GPU, 0 where that is not known), `passes` and `seconds`. Raises
    `OutOfMemory`, `Cancelled`, and what `Engine.generate` raises.
    """
    pids = sorted({os.getpid(), *engine.pids()})
    give_back_free_memory()
    reset_peaks(pids)
    started = time.perf_counter()
    vocabulary = read_model_shape(Path(config.initial_model.path)).vocabulary
    prompts = load.prompts(vocabulary, engine.max_model_len)
    try:
        with guarded("rollout", f"decoding {load.requests} sequences of {load.context} tokens"):
            rates = await _rates(engine, prompts, load.seconds, cancelled)
    finally:
        engine.finish([prompt.sequence_id for prompt in prompts])
    return {
        "tokens_per_second": statistics.median(rates),
        "peak_bytes": _peak(engine, pids),
        "passes": float(len(rates)),
        "seconds": time.perf_counter() - started,
    }


async def _rates(
    engine: Engine,
    prompts: Sequence[GenerationRequest],
    seconds: float,
    cancelled: threading.Event,
) -> list[float]:
    """Tokens/s of each pass over all answers."""
    read = await engine.generate([replace(prompt, max_tokens=1) for prompt in prompts])
    begun = [
        replace(prompt, tokens=[*prompt.tokens, *answer.tokens])
        for prompt, answer in zip(prompts, read, strict=True)
    ]
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while len(rates) < 2 or time.perf_counter() < until:
        if cancelled.is_set():
            raise Cancelled("the measurement was cancelled; nothing of it is kept")
        began = time.perf_counter()
        answers = await engine.generate(begun)
        count = sum(len(answer.tokens) for answer in answers)
        rates.append(count / (time.perf_counter() - began))
    return rates


def _peak(engine: Engine, pids: Sequence[int]) -> float:
    import torch

    if torch.cuda.is_available():
        # An engine whose processes are not this one keeps its device's numbers to itself.
        return engine.statistics().get("peak_memory_bytes", 0.0) if not engine.pids() else 0.0
    return float(private_peak_bytes(pids))

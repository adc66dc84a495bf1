"""Ask an engine what the probe of a publication asks, before it plays under that version."""

from __future__ import annotations

import time
from collections.abc import Sequence

from earl_core.algorithms.importance import mismatch_metrics
from earl_core.rollout.engines.engine import Engine, GenerationRequest
from earl_core.weights.probe import ProbedRow

_FIRST_ID = 1 << 62
"""Sequences of a probe; no episode has such a number."""

_SHOWN = ("mean", "p95", "max", "growth")


async def answered(engine: Engine, rows: Sequence[ProbedRow]) -> dict[str, float]:
    """Have the engine give one greedy token to each beginning; each row's go on from one another,
    as the turns of an episode do.

    Returns `probe_mismatch_*`, as `mismatch_metrics` has them, of the log-probs of those tokens
    that the learner holds the likeliest too, `probe_other_share`, the share of the others, and
    `probe_seconds`. Nothing where the engine has room for no beginning. Raises as
    `Engine.generate` does.
    """
    started = time.perf_counter()
    asked: list[tuple[ProbedRow, int]] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    ids = range(_FIRST_ID, _FIRST_ID + len(rows))
    try:
        for place in range(max((len(row.lengths) for row in rows), default=0)):
            # A longer beginning than there is room for is one that this engine cannot play, too.
            now = [
                (number, row)
                for number, row in zip(ids, rows, strict=True)
                if place < len(row.lengths) and row.lengths[place] < engine.max_model_len
            ]
            answers = await engine.generate([_request(*each, place) for each in now]) if now else []
            for (_, row), answer in zip(now, answers, strict=True):
                asked.append((row, place))
                tokens += answer.tokens
                logprobs += answer.logprobs
    finally:
        engine.finish(ids)
    if not asked:
        return {}
    same = [
        (row.logprobs[place], logprob, float(row.lengths[place]))
        for (row, place), token, logprob in zip(asked, tokens, logprobs, strict=True)
        if row.likeliest[place] == token
    ]
    trainer, of_engine, positions = zip(*same, strict=True) if same else ((), (), ())
    found = mismatch_metrics(trainer, of_engine, positions)
    return {
        **{f"probe_mismatch_{name}": found[f"mismatch_{name}"] for name in _SHOWN if found},
        "probe_other_share": 1.0 - len(same) / len(asked),
        "probe_seconds": time.perf_counter() - started,
    }


def _request(number: int, row: ProbedRow, place: int) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=number,
        tokens=row.tokens[: row.lengths[place]],
        max_tokens=1,
        temperature=0.0,
        seed=0,
        drafted=False,
    )

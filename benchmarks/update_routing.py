"""Bytes that context ranks read of recorded experts, over those that they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.update_episodes import workload
from benchmarks.update_models import recorded
from benchmarks.update_side import training_samples
from earl_core.learner.attention.context_parallel import ContextGroup
from earl_core.learner.data.packing import TrainingSample, pack, plan_rows
from earl_core.trajectory.routing import HASH_BYTES, RoutingShape
from tools.harness import Report

_LARGE = RoutingShape(layers=48, chosen=8, experts=128)
"""That of Qwen3-30B-A3B."""

_BUDGET = 4096


def routing_bytes(
    samples: Sequence[TrainingSample], budget: int, ranks: int
) -> tuple[float, float]:
    """Bytes that context ranks read of the routing column to pack the samples, together, over those
    of the tokens that they compute: without and with the hashes that tell where it is equal."""
    draw = np.random.default_rng(0)
    # By token and place, so that beginnings that samples share are routed alike.
    table = draw.integers(0, _LARGE.experts, (4096, _LARGE.width)).astype(_LARGE.dtype)
    every = []
    for sample in samples:
        rows = table[(sample.tokens + 31 * np.arange(len(sample.tokens))) % len(table)]
        every.append(recorded(sample, rows, _LARGE))
    plan = plan_rows(every, range(len(every)), budget, False)
    computed = 0
    for place in (ContextGroup(rank, ranks, None) for rank in range(ranks)):
        packs = [pack(every, rows, routed=place.places) for rows in plan]
        computed = sum(each.tokens.size for each in packs)
    needed = computed * _LARGE.token_bytes
    read = sum(each.routing.read_bytes for each in every if each.routing is not None)
    hashes = HASH_BYTES * ranks * sum(len(each.tokens) for each in every)
    return read / needed, (read + hashes) / needed


def add_routing(report: Report) -> None:
    """The figure, of all recorded episodes, as a headline and a note."""
    samples = training_samples(workload(None, 48))
    found = {ranks: routing_bytes(samples, _BUDGET, ranks) for ranks in (2, 4)}
    report.headline["routing_bytes_over_needed"] = max(read for read, _ in found.values())
    hashed = " and ".join(f"{both:.3f} for {ranks}" for ranks, (_, both) in found.items())
    report.notes.append(
        "routing_bytes_over_needed: what two and four context ranks read of the routing column, "
        "over what their tokens have there, of 48 layers x 8 experts and all recorded episodes; "
        f"with the hashes of all tokens, which every rank reads, {hashed}. Counted where packs are "
        "made; nothing is computed for it."
    )

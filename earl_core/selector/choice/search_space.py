"""Which candidates of a stage are put up for choice, once memory and settings have had their say.

`candidates` lists what hardware and model allow. Here the ladder against memory running out is
climbed: smaller microbatches (or fewer sequences at a time), logits in chunks, checkpointing,
offload. Without measurements a rung above the first that fits can only be slower, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from earl_core.selector.model.candidates import (
    Candidate,
    RuledOut,
    coarse,
    logits_chunk,
    rollout_candidates,
    round_up,
    rungs,
    smaller_microbatches,
    update_candidates,
)

if TYPE_CHECKING:
    from earl_core.selector.choice.predict import Predictor
    from earl_core.selector.choice.selection import SelectionInput

_WORTH_SAVING = 0.02
"""Share of a stage's memory for which logits are computed in chunks smaller than usual."""

_RUNNING = "max_running_requests"
_FIELDS = {
    "tensor_parallel": "tensor",
    "context_parallel": "context",
    _RUNNING: "running",
    "max_tokens_per_microbatch": "microbatch",
    "activation_checkpointing": "checkpointing",
    "logits_chunk_tokens": "logits_chunk",
    "offload_optimizer": "offload",
}


def offers(predictor: Predictor, stage: str) -> tuple[list[Candidate], list[RuledOut]]:
    """All layouts of the stage that obey hardware, model and the fields held fixed."""
    made, out = _rollout(predictor) if stage == "rollout" else _training(predictor, stage)
    given = predictor.given
    kept = [c for c in made if _as_fixed(c, given)] if given.selector.fixed_fields else made
    if len(kept) < len(made) or (given.selector.fixed_fields and not kept):
        reason = "selector.fixed_fields holds a field that these layouts would move"
        label = f"{len(made) - len(kept)} layouts" if kept else "all layouts"
        out.append(RuledOut(stage, label, reason))
    return list(dict.fromkeys(kept)), out


def _rollout(predictor: Predictor) -> tuple[list[Candidate], list[RuledOut]]:
    config = predictor.given.rollout
    one_device = config.engine == "torch"
    allowed = (1,) if one_device else predictor.given.selector.tensor_parallel
    made, out = rollout_candidates(
        predictor.shape,
        predictor.hardware,
        predictor.now.episodes,
        (config.max_running_requests,),
        allowed,
    )
    limits = _by_memory if one_device else _by_cache
    return [limited for candidate in made for limited in limits(predictor, candidate)], out


def _by_cache(predictor: Predictor, candidate: Candidate) -> list[Candidate]:
    """The configured limit on running sequences, and the one that the cache just holds."""
    fits = coarse(predictor.capacity(candidate) / max(1.0, predictor.ahead.context))
    offered = min(candidate.running, predictor.now.episodes / candidate.replicas)
    limited = candidate._replace(running=fits)
    return [candidate, limited] if 1 <= fits < offered else [candidate]


def _by_memory(predictor: Predictor, candidate: Candidate) -> list[Candidate]:
    """The configured limit, and where that is too much the greatest at which memory lasts: the
    torch engine's cache grows with the sequences in play."""
    if predictor.fits(candidate):
        return [candidate]
    offered = min(candidate.running, predictor.now.episodes / candidate.replicas)
    limited, limit = candidate, coarse(offered)
    while limit:
        limited = candidate._replace(running=limit)
        if limit < offered and predictor.fits(limited):
            break
        limit = coarse(limit - 1)
    return [candidate, limited]


def _training(predictor: Predictor, stage: str) -> tuple[list[Candidate], list[RuledOut]]:
    given = predictor.given
    asked = given.update.max_tokens_per_microbatch
    larger, smaller = _sizes(predictor, asked)
    meshes, out = update_candidates(
        predictor.shape, predictor.hardware, predictor.now.episodes, (asked,), stage
    )
    # On a CPU there is one mesh; the many of GPUs would make too many layouts.
    tried = smaller if predictor.device.kind == "cpu" else smaller[:1]
    always = given.update.activation_checkpointing and stage == "update"
    made: list[Candidate] = []
    for mesh in meshes:
        first = mesh._replace(checkpointing=True) if always else mesh
        sized = [*(first._replace(microbatch=size) for size in larger), first]
        if predictor.measured(stage):
            for candidate in (*sized, *(first._replace(microbatch=size) for size in tried)):
                made += _ladder(predictor, candidate)
        else:
            for candidate in sized:
                made += _first_that_fits(predictor, _ladder(predictor, candidate))
        if not predictor.fits(first):
            made += _less_at_a_time(predictor, first, smaller)
    return made, out


def _sizes(predictor: Predictor, asked: int) -> tuple[list[int], list[int]]:
    """Token budgets above the one asked for, and below it."""
    given, longest = predictor.given, predictor.ahead.longest
    if "update.max_tokens_per_microbatch" in given.selector.fixed_fields:
        return [], []
    whole = round_up(longest, 1024)
    # Budgets below the longest sample are alike: each sample is a microbatch of its own.
    larger = {size for size in (2 * asked, 4 * asked, 8 * asked, whole) if size >= whole}
    return sorted(size for size in larger if size > asked), smaller_microbatches(asked, longest)


def _less_at_a_time(
    predictor: Predictor, candidate: Candidate, smaller: list[int]
) -> list[Candidate]:
    """The largest smaller microbatch that fits as it is, else the smallest with more means."""
    last = None
    for size in smaller:
        last = candidate._replace(microbatch=size)
        if predictor.fits(last):
            return [last]
    return [] if last is None else _first_that_fits(predictor, _ladder(predictor, last))


def _ladder(predictor: Predictor, candidate: Candidate) -> Iterator[Candidate]:
    given = predictor.given
    free = "update.activation_checkpointing" not in given.selector.fixed_fields
    chunk = logits_chunk(predictor.shape.vocabulary)
    cpu = predictor.device.kind == "cpu"
    saved = predictor.stage_peak(candidate) - predictor.stage_peak(
        candidate._replace(logits_chunk=chunk)
    )
    if saved < _WORTH_SAVING * predictor.budget(candidate.stage):
        # The learner never computes all logits at once: smaller chunks than its own slow the head
        # down, and on a CPU they may take more than they save.
        chunk = 0
    for rung in rungs(candidate, chunk, free and candidate.stage == "update"):
        # On a CPU the optimizer lies in the host's memory as it is.
        if not (rung.offload and cpu) and _as_fixed(rung, given):
            yield rung


def _first_that_fits(predictor: Predictor, ladder: Iterable[Candidate]) -> list[Candidate]:
    """One rung; the last when none fits, and none of an empty ladder."""
    last = None
    for last in ladder:
        if predictor.fits(last):
            break
    return [] if last is None else [last]


def _as_fixed(candidate: Candidate, given: SelectionInput) -> bool:
    """Whether every field that the user holds fixed is as `fixed` would have it."""
    for name in given.selector.fixed_fields:
        stage, _, field = name.partition(".")
        if stage == candidate.stage or (stage, candidate.stage) == ("update", "reference"):
            have = getattr(candidate, _FIELDS.get(field, field))
            if have != _wanted(given, stage, field):
                return False
    return True


def _wanted(given: SelectionInput, stage: str, field: str) -> object:
    engines, mesh = given.layout.at(given.iteration)
    if stage == "rollout":
        return given.rollout.max_running_requests if field == _RUNNING else getattr(engines, field)
    if field in ("max_tokens_per_microbatch", "activation_checkpointing"):
        return getattr(given.update, field)
    if field == "logits_chunk_tokens":
        return mesh.logits_chunk_tokens or 0
    return getattr(mesh, "replicate" if field == "replicas" else field)

"""The candidates of a stage that stand for choice, once memory and settings ruled out others.

`candidates` lists what hardware and model allow. Here the memory fallback takes its steps: smaller
microbatches (or fewer sequences at a time), logits in chunks, checkpointing, offload. Without
measurements a step beyond the first that fits can only be slower, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

from earl_core.deployment.placement import most_on_a_host
from earl_core.deployment.stage_deployment import CHECKPOINTING, Checkpointing, StageDeployment
from earl_core.deployment.stages import TRAINED
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.candidates import (
    Offers,
    RuledOut,
    fallbacks,
    rollout_candidates,
    training_candidates,
)
from earl_core.selector.model.sizes import coarse, logits_chunk, smaller_microbatches

_LEAST_TOKENS = 1024
_WORTH_SAVING = 0.02
"""Share of a stage's memory for which logits are computed in chunks smaller than usual."""


def offers(predictor: Predictor, stage: str) -> Offers:
    """All candidates of the stage that obey hardware, model and the fields held fixed."""
    made, out = _rollout(predictor) if stage == "rollout" else _training(predictor, stage)
    kept = [each for each in made if _as_fixed(each, predictor)]
    if len(kept) < len(made) or (predictor.given.selector.fixed_fields and not kept):
        reason = "selector.fixed_fields holds a field that these would move"
        label = f"{len(made) - len(kept)} candidates" if kept else "all candidates"
        out.append(RuledOut(stage, label, reason))
    return _apart(predictor, stage, list(dict.fromkeys(kept)), out)


def _apart(
    predictor: Predictor, stage: str, made: list[StageDeployment], out: list[RuledOut]
) -> Offers:
    """Leave out what would reach into the other side's devices of a host: hosts have equal numbers
    of engines and of ranks that share matrices, whose devices are of one host."""
    part = predictor.part(stage)
    if not (predictor.division.engine_devices and part.gpus):
        return made, out
    kept = [each for each in made if most_on_a_host(each, part.hosts) <= part.devices_per_host]
    if len(kept) < len(made):
        reason = "a host would need more devices than its side has"
        out.append(RuledOut(stage, f"{len(made) - len(kept)} candidates", reason))
    return kept, out


def with_fitting_microbatch(given: SelectionInput) -> SelectionInput:
    """Set the token budget of the update where the run file leaves it open: on GPUs the most that
    fits the configured stage deployment."""
    if given.update.max_tokens_per_microbatch is not None:
        return given
    size = given.update.tokens_per_microbatch(given.hardware.gpus > 0)
    if given.hardware.gpus:
        predictor = Predictor(given)
        mesh = predictor.candidate_of(predictor.configured["update"])
        # Below the longest sample all sizes are alike.
        least = max(_LEAST_TOKENS, predictor.ahead.longest)
        while size > least and not predictor.fits(_with_microbatch(mesh, size)):
            size //= 2
    update = given.update.model_copy(update={"max_tokens_per_microbatch": size})
    return given.model_copy(update={"update": update})


def _rollout(predictor: Predictor) -> Offers:
    config = predictor.given.rollout
    one_device = config.engine == "torch"
    made, out = rollout_candidates(
        predictor.shape,
        predictor.part("rollout"),
        predictor.now.episodes,
        config.max_running_requests,
        (1,) if one_device else predictor.given.selector.tensor_parallel,
    )
    limits = _by_memory if one_device else _by_cache
    return [limited for candidate in made for limited in limits(predictor, candidate)], out


def _by_cache(predictor: Predictor, candidate: StageDeployment) -> list[StageDeployment]:
    """The configured limit on running sequences, and the one that the cache just holds."""
    fits = coarse(predictor.capacity(candidate) / max(1.0, predictor.ahead.context))
    if not 1 <= fits < predictor.now.offered(candidate):
        return [candidate]
    limited = candidate._replace(max_running_requests=fits)
    # In a stream others would have to give their place up again and again.
    return [limited] if predictor.given.streams else [candidate, limited]


def _by_memory(predictor: Predictor, candidate: StageDeployment) -> list[StageDeployment]:
    """The configured limit, and where that is too much the greatest at which memory lasts: the
    torch engine's cache grows with the sequences in play."""
    if predictor.fits(candidate):
        return [candidate]
    offered = predictor.now.offered(candidate)
    limited, limit = candidate, coarse(offered)
    while limit:
        limited = candidate._replace(max_running_requests=limit)
        if limit < offered and predictor.fits(limited):
            break
        limit = coarse(limit - 1)
    return [candidate, limited]


def _training(predictor: Predictor, stage: str) -> Offers:
    given = predictor.given
    asked = given.update.tokens_per_microbatch(predictor.hardware.gpus > 0)
    larger, smaller = _sizes(predictor, asked)
    episodes = predictor.now.episodes
    shape = given.shape_of(stage)
    meshes, out = training_candidates(stage, shape, predictor.part(stage), episodes, asked)
    # On a CPU there is one mesh; the many of GPUs would make too many candidates.
    tried = smaller if predictor.memory.shared else smaller[:1]
    least = given.update.activation_checkpointing if stage in TRAINED else "none"
    made: list[StageDeployment] = []
    for mesh in meshes:
        first = mesh._replace(activation_checkpointing=least)
        sized = partial(_with_microbatch, first)
        if predictor.measured(stage):
            for size in (*larger, asked, *tried):
                made += _fallbacks(predictor, sized(size))
        else:
            for size in (*larger, asked):
                made += _first_that_fits(predictor, _fallbacks(predictor, sized(size)))
        if not predictor.fits(first):
            made += _less_at_a_time(predictor, [sized(size) for size in smaller])
    return made, out


def _with_microbatch(candidate: StageDeployment, size: int) -> StageDeployment:
    return candidate._replace(max_tokens_per_microbatch=size)


def _sizes(predictor: Predictor, asked: int) -> tuple[list[int], list[int]]:
    """Token budgets above the one asked for, and below it."""
    given, longest = predictor.given, predictor.ahead.longest
    if "update.max_tokens_per_microbatch" in given.selector.fixed_fields:
        return [], []
    whole = 1024 * math.ceil(longest / 1024)
    # Budgets below the longest sample are alike: each sample is a microbatch of its own.
    larger = {size for size in (2 * asked, 4 * asked, 8 * asked, whole) if size >= whole}
    return sorted(size for size in larger if size > asked), smaller_microbatches(asked, longest)


def _less_at_a_time(
    predictor: Predictor, smaller: list[StageDeployment]
) -> Iterable[StageDeployment]:
    """The largest smaller microbatch that fits as it is, else the smallest with more means."""
    for candidate in smaller:
        if predictor.fits(candidate):
            return [candidate]
    return _first_that_fits(predictor, _fallbacks(predictor, smaller[-1])) if smaller else []


def _fallbacks(predictor: Predictor, candidate: StageDeployment) -> Iterator[StageDeployment]:
    shape = predictor.given.shape_of(candidate.stage)
    chunk = logits_chunk(shape.outputs, gpu=not predictor.memory.shared)
    saved = predictor.stage_peak(candidate) - predictor.stage_peak(
        candidate._replace(logits_chunk_tokens=chunk)
    )
    if saved < _WORTH_SAVING * predictor.budget(candidate.stage):
        # The learner never computes all logits at once: smaller chunks than its own slow the head
        # down, and on a CPU they may take more than they save.
        chunk = 0
    for step in fallbacks(candidate, chunk, _rungs(predictor, candidate.stage)):
        # On a CPU the optimizer lies in the host's memory as it is.
        if not (step.offload_optimizer and predictor.memory.shared) and _as_fixed(step, predictor):
            yield step


def _rungs(predictor: Predictor, stage: str) -> tuple[Checkpointing, ...]:
    """The kinds of activation checkpointing that may be chosen, `none` first."""
    given = predictor.given
    if stage not in TRAINED or "update.activation_checkpointing" in given.selector.fixed_fields:
        return ()
    # A compiled layer has no selective checkpointing of its own: it keeps little more anyway.
    return tuple(
        rung
        for rung in CHECKPOINTING
        if not (rung == "selective" and given.update.compiles(predictor.hardware.gpus > 0))
    )


def _first_that_fits(
    predictor: Predictor, steps: Iterable[StageDeployment]
) -> list[StageDeployment]:
    """One step; the last when none fits, and none where there are none."""
    last = None
    for last in steps:
        if predictor.fits(last):
            break
    return [] if last is None else [last]


def _as_fixed(candidate: StageDeployment, predictor: Predictor) -> bool:
    """Tell whether every field that the user holds fixed is as `fixed` would have it."""
    section = "rollout" if candidate.stage == "rollout" else "update"
    configured = predictor.configured[section]
    held = (name.split(".") for name in predictor.given.selector.fixed_fields)
    return all(
        getattr(candidate, field) == getattr(configured, field)
        for stage, field in held
        if stage == section
    )

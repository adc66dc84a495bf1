"""Measure seconds and memory of an update, or of scoring alone, for samples of one length."""

from __future__ import annotations

import math
import os
import statistics
import time

import numpy as np
import torch

from earl_core.config import RunConfig
from earl_core.learner import memory
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.value_scoring import ValueScoring
from earl_core.selector.choice.expected_load import GENERATED_SHARE
from earl_core.selector.profile_planner import MICROBATCHES, WINDOW_SECONDS
from earl_core.system.memory import give_back_free_memory, private_peak_bytes
from earl_core.tensors.collectives import Ranks
from earl_core.trajectory.routing import RecordedRouting
from earl_core.trajectory.schema import SAMPLE_BITS


def measure_training(
    learner: PolicyLearner, config: RunConfig, context: int, samples: int, *, scoring: bool = False
) -> dict[str, float]:
    """Time a few microbatches and an optimizer step, and work out the whole stage from them.

    context: tokens of each of the stage's `samples` synthetic samples, half of them trained on.
    scoring: a forward pass only, as the reference does it; else the whole update, with the scores
    that it begins with where the algorithm needs them. The learner must not have been updated
    yet, and is afterwards as it was: its learning rate is 0 and its optimizer's state is dropped.
    Collective. Returns `tokens_per_second` of the stage as this rank saw it, `peak_bytes` of this
    rank (private memory, or the device's), `microbatch_seconds`, `step_seconds` (0 when scoring)
    and `seconds`. Raises `OutOfMemory` and what `PolicyLearner.update` raises.
    """
    started = time.perf_counter()
    settings = learner.config
    steps = 1 if scoring else settings.minibatches
    share = math.ceil(samples / (steps * learner.mesh.deployment.data_parallel))
    # What a rank goes through in one step (or pass of scoring), in full microbatches.
    together = min(max(1, learner.tokens_per_microbatch // context), share)
    microbatches = share / together
    measured = min(MICROBATCHES, math.ceil(microbatches))
    made = _synthetic_samples(learner, config, context, measured * together)
    give_back_free_memory()
    microbatch = step = stage = 0.0
    if scoring or (config.needs_old_logprobs and not _of_values(learner)):
        memory.reset_peak()
        microbatch = _time_scoring(learner, made, together)
        stage += steps * microbatches * microbatch
    if not scoring:
        microbatch, step = _time_update(learner, made, together)
        stage += settings.epochs * steps * (microbatches * microbatch + step)
    return {
        "tokens_per_second": samples * context / stage,
        "peak_bytes": _peak(),
        "microbatch_seconds": microbatch,
        "step_seconds": step,
        "seconds": time.perf_counter() - started,
    }


def _time_scoring(learner: PolicyLearner, samples: list[TrainingSample], together: int) -> float:
    """Seconds of a full microbatch, of so many samples."""
    learner.score(samples[:together])
    clock = _Clock(learner)
    while clock.goes_on():
        learner.score(samples, on_progress=clock.microbatch_ended)
    return clock.microbatch()


def _time_update(
    learner: PolicyLearner, samples: list[TrainingSample], together: int
) -> tuple[float, float]:
    """Seconds of a full microbatch, forward and backward, and of an optimizer step."""
    config = learner.config
    still = {"epochs": 1, "minibatches": 1, "learning_rate": 0.0, "weight_decay": 0.0}
    learner.config = config.model_copy(update=still)
    try:
        # The first step makes the optimizer's state, and the first microbatch touches its memory.
        learner.update(samples[:together], iteration=0)
        clock = _Clock(learner)
        while clock.goes_on():
            learner.update(
                samples, iteration=0, on_progress=clock.microbatch_ended, on_step=clock.step_ended
            )
        return clock.microbatch(), clock.step()
    finally:
        learner.config = config
        learner.optimizer.state.clear()


class _Clock:
    """Times the microbatches and steps of several passes; all ranks go through as many."""

    def __init__(self, learner: PolicyLearner) -> None:
        self._ranks = Ranks(learner.mesh)
        self._until = time.perf_counter() + WINDOW_SECONDS
        self._last = 0.0
        self._alone: list[float] = []
        self._following: list[float] = []
        self._steps: list[float] = []
        self._first = True

    def goes_on(self) -> bool:
        """Tell whether another pass begins: while any rank has time left, and at least one."""
        begun = bool(self._alone)
        (more,) = self._ranks.most([int(not begun or time.perf_counter() < self._until)])
        self._last, self._first = _now(), True
        return bool(more)

    def microbatch_ended(self, done: int, samples: int) -> None:
        now = _now()
        (self._alone if self._first else self._following).append(now - self._last)
        self._last, self._first = now, False

    def step_ended(self, index: int) -> None:
        now = _now()
        self._steps.append(now - self._last)
        self._last = now

    def microbatch(self) -> float:
        """The first of a pass, which begins with what is done once, counts only where it is all."""
        return statistics.median(self._following or self._alone)

    def step(self) -> float:
        return statistics.median(self._steps)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak() -> float:
    """Return the peak bytes of the device, or of the private memory, since the last reset."""
    if torch.cuda.is_available():
        return memory.peak_bytes()["peak_cuda_bytes"]
    return float(private_peak_bytes([os.getpid()]))


def _synthetic_samples(
    learner: PolicyLearner, config: RunConfig, context: int, count: int
) -> list[TrainingSample]:
    """Random tokens that share no beginnings, the second half of them trained on."""
    vocabulary = int(learner.model.config.get_text_config().vocab_size)
    first = learner.mesh.data_rank * count
    random = np.random.default_rng(first)
    mask = np.zeros(context, dtype=np.uint8)
    mask[-max(1, round(GENERATED_SHARE * context)) :] = 1
    unsure = np.full(context, -math.log(vocabulary), dtype=np.float32)
    return [
        TrainingSample(
            tokens=random.integers(0, vocabulary, context, dtype=np.int32),
            loss_mask=mask,
            rollout_logprobs=unsure,
            advantages=np.full(context, 1.0 if number % 2 else -1.0, dtype=np.float32),
            reference_logprobs=unsure if config.needs_reference else None,
            old_logprobs=unsure if config.needs_old_logprobs else None,
            values=np.zeros(context, dtype=np.float32) if _of_values(learner) else None,
            routing=_routing(learner, config, context, number),
            episode_id=number,
            group_id=number // config.rollout.group_size,
            sample_id=number << SAMPLE_BITS,
        )
        for number in range(first, first + count)
    ]


def _of_values(learner: PolicyLearner) -> bool:
    """Tell whether it is a critic."""
    return isinstance(learner.parallel.module.scoring, ValueScoring)


def _routing(
    learner: PolicyLearner, config: RunConfig, context: int, seed: int
) -> RecordedRouting | None:
    """Random experts of each token, in a run that records them."""
    routers = learner.parallel.module.routers
    if routers is None or _of_values(learner) or config.rollout.record_routing == "off":
        return None
    shape = routers.shape
    first = np.random.default_rng(seed).integers(0, shape.experts, (context, shape.layers, 1))
    chosen = (first + np.arange(shape.chosen)) % shape.experts
    return RecordedRouting(shape, chosen.astype(shape.dtype), context, f"sample {seed}")

"""Seconds and memory of every candidate: roofline, measurements and memory model together."""

from __future__ import annotations

import math
from typing import NamedTuple

from earl_core.selector.candidates import (
    Candidate,
    RuledOut,
    rollout_candidates,
    round_up,
    rungs,
    update_candidates,
)
from earl_core.selector.catalogue import device_of
from earl_core.selector.deployment import StageDeployment
from earl_core.selector.expectation import loads
from earl_core.selector.memory_model import (
    Memory,
    TrainingNeeds,
    engine_memory,
    kv_bytes_per_token,
    kv_capacity_tokens,
    scoring_memory,
    training_memory,
)
from earl_core.selector.profile_table import Correction, ProfilePoint
from earl_core.selector.roofline import Load, Roofline
from earl_core.selector.selection import SelectionInput, model_length

STAGES = ("rollout", "reference", "update")
"""Stages whose layout is a choice, in their order."""


class Prediction(NamedTuple):
    """One candidate under one load.

    seconds: of the stage, infinite when it cannot run. peak, budget: bytes on one device. filled:
    for rollouts, the share of the KV cache that the sequences offered would take (above 1 they
    queue). measured: how much measurement stands behind the seconds, 0 (a guess) to 1. problem:
    why the candidate is ruled out; empty when it is not.
    """

    candidate: Candidate
    seconds: float
    peak: float
    budget: float
    filled: float = 0.0
    measured: float = 0.0
    problem: str = ""

    @property
    def guess(self) -> bool:
        """Whether roofline and memory formula say more about it than measurements."""
        return self.measured < 0.5


class NothingFits(RuntimeError):
    """No layout of a stage fits the memory. `nearest` is the candidate that came closest; its
    `peak` and `budget` are bytes on one device."""

    def __init__(self, stage: str, nearest: Prediction | None) -> None:
        why = f": {nearest.candidate.label}: {nearest.problem}" if nearest else ""
        super().__init__(
            f"no layout of the {stage} fits the memory{why}. Add devices or memory, lower "
            "rollout.max_model_len if it is larger than needed, or free what selector.fixed_fields "
            "and selector.tensor_parallel hold"
        )
        self.stage, self.nearest = stage, nearest


class Predictor:
    """Everything about one `SelectionInput` that its candidates share.

    roofline: another one than the default, for comparisons.
    """

    def __init__(self, given: SelectionInput, roofline: Roofline | None = None) -> None:
        self.given = given
        self.shape, self.hardware = given.model.sizes(), given.hardware
        self.device = device_of(given.hardware)
        self.roofline = roofline or Roofline(self.shape, self.device, self.hardware)
        self.needs = TrainingNeeds(given.update.precision == "bf16", given.trained_share)
        self.now, self.ahead = loads(given)
        seen = max(self.ahead.longest, max(given.statistics.context_max, default=0.0))
        self.max_model_len, self.length_reason = model_length(given, seen)
        self._points = given.profile.by_key()
        self._failed = [p for p in given.profile.points if p.out_of_memory]
        self._measured_stages = {key.split()[0] for key in self._points}
        self._corrections: dict[str, Correction] = {}
        self._correctors = {stage: given.calibration.corrector(stage) for stage in STAGES}
        self._forbidden = {self.candidate_of(item) for item in given.forbidden}
        self._budget = self._training_budget()
        self._peaks: dict[Candidate, float] = {}
        self._engines: dict[tuple[int, int], Memory] = {}

    def candidate_of(self, deployment: StageDeployment) -> Candidate:
        """The candidate behind a part of a plan; on GPUs threads are no part of the choice."""
        candidate = Candidate.of(deployment)
        return candidate._replace(threads=1) if self.hardware.gpus else candidate

    # Candidates

    def candidates(self, stage: str) -> tuple[list[Candidate], list[RuledOut]]:
        """All layouts of the stage that obey hardware, model and the fields held fixed."""
        if stage == "rollout":
            limits = (self.given.rollout.max_running_requests,)
            one_device = self.given.rollout.engine == "torch"
            allowed = (1,) if one_device else self.given.selector.tensor_parallel
            made, out = rollout_candidates(
                self.shape, self.hardware, self.now.episodes, limits, allowed
            )
            made = [limited for candidate in made for limited in self._limits(candidate)]
        else:
            sizes = self._microbatches()
            made, out = update_candidates(
                self.shape, self.hardware, self.now.episodes, sizes, stage
            )
            vary = "update.activation_checkpointing" not in self.given.selector.fixed_fields
            always = self.given.update.activation_checkpointing
            made = [c._replace(checkpointing=always and stage == "update") for c in made]
            made = [rung for c in made for rung in self._rungs(c, vary)]
        held = self.given.selector.fixed_fields
        kept = [c for c in made if self._as_fixed(c)] if held else made
        if len(kept) < len(made):
            reason = "selector.fixed_fields holds a field that these layouts would move"
            out.append(RuledOut(stage, f"{len(made) - len(kept)} layouts", reason))
        return kept, out

    def _limits(self, candidate: Candidate) -> list[Candidate]:
        """The configured limit on running sequences, and the one that the cache just holds."""
        capacity = self._capacity(candidate)
        fits = _coarse(capacity / max(1.0, self.ahead.context))
        offered = min(candidate.running, self.now.episodes / candidate.replicas)
        limited = candidate._replace(running=fits)
        return [candidate, limited] if 1 <= fits < offered else [candidate]

    def _microbatches(self) -> tuple[int, ...]:
        asked = self.given.update.max_tokens_per_microbatch
        if "update.max_tokens_per_microbatch" in self.given.selector.fixed_fields:
            return (asked,)
        longest = round_up(self.ahead.longest, 1024)
        # Budgets below the longest sample are alike: each sample is a microbatch of its own.
        larger = [size for size in (2 * asked, 4 * asked, 8 * asked, longest) if size >= longest]
        return tuple(sorted({asked, *(size for size in larger if size > asked)}))

    def _rungs(self, candidate: Candidate, vary_checkpointing: bool) -> list[Candidate]:
        """Without measurements a rung above the first that fits can only be slower."""
        scoring = candidate.stage == "reference"
        ladder = rungs(candidate, vary_checkpointing and not scoring)
        held = self.given.selector.fixed_fields
        # On a CPU the optimizer lies in the host's memory as it is.
        ladder = (rung for rung in ladder if not rung.offload or self.device.kind == "gpu")
        allowed = (rung for rung in ladder if not held or self._as_fixed(rung))
        if candidate.stage in self._measured_stages:
            return list(allowed)
        last = None
        for last in allowed:
            if self._final_peak(last) <= self._budget:
                break
        return [] if last is None else [last]

    def _as_fixed(self, candidate: Candidate) -> bool:
        """Whether every field that the user holds fixed is as `fixed` would have it."""
        for name in self.given.selector.fixed_fields:
            stage, _, field = name.partition(".")
            if stage == candidate.stage or (stage, candidate.stage) == ("update", "reference"):
                have, want = _field(candidate, field), self._wanted(stage, field)
                if have != want:
                    return False
        return True

    def _wanted(self, stage: str, field: str) -> object:
        if stage == "rollout":
            return self.given.rollout.max_running_requests if field == _RUNNING else 1
        config = self.given.update
        if field in ("max_tokens_per_microbatch", "activation_checkpointing"):
            return getattr(config, field)
        return {"logits_chunk_tokens": 0, "offload_optimizer": False}.get(field, 1)

    # Memory

    def _training_budget(self) -> float:
        share = self.given.selector.memory_fraction
        if self.device.kind == "gpu":
            return share * self.device.memory_bytes
        return share * self.hardware.memory_bytes

    def _engine(self, candidate: Candidate) -> Memory:
        place = candidate.tensor, candidate.running
        if place not in self._engines:
            vllm = self.given.rollout.vllm
            budget = vllm.gpu_memory_utilization
            if self.device.kind == "cpu":
                budget = (vllm.kv_cache_gib or 2) * 2.0**30
            self._engines[place] = engine_memory(self.shape, self.device, candidate, budget)
        return self._engines[place]

    def _capacity(self, candidate: Candidate) -> float:
        return kv_capacity_tokens(self.shape, self._engine(candidate), candidate.tensor)

    def formula_peak(self, candidate: Candidate, load: Load) -> float:
        """Bytes on one device by formula alone: what `Peak.predicted` of a measurement is."""
        if candidate.stage == "rollout":
            return self._engine(candidate).total
        model = scoring_memory if candidate.stage == "reference" else training_memory
        return model(self.shape, candidate, load.longest, self.needs).total

    def peak(self, candidate: Candidate, load: Load) -> float:
        """Bytes on one device, calibrated by measured peaks."""
        return self._correctors[candidate.stage](self.formula_peak(candidate, load))

    def _final_peak(self, candidate: Candidate) -> float:
        """The peak at the end of the forecast, which every candidate is judged by."""
        peak = self._peaks.get(candidate)
        if peak is None:
            peak = self._peaks[candidate] = self.peak(candidate, self.ahead)
        return peak

    # Predictions

    def predict(self, candidate: Candidate, load: Load) -> Prediction:
        """Seconds and memory under a load; whether it fits is judged at the forecast one."""
        if candidate.stage == "rollout":
            return self._predict_rollout(candidate, load)
        peak = self._final_peak(candidate)
        if self.device.kind == "cpu":
            peak *= candidate.ranks
        budget = self._budget
        epochs, steps = self.given.update.epochs, self.given.update.minibatches
        only = candidate.stage == "reference"
        seconds = self.roofline.training_seconds(
            candidate, load, 1 if only else epochs, epochs * steps, only
        )
        factor, measured = self._correction(candidate)(load.context, float(load.episodes))
        problem = self._refused(candidate, load.context, float(load.episodes))
        if not problem and peak > budget:
            tokens = max(candidate.microbatch, round(self.ahead.longest))
            problem = (
                f"a microbatch of {tokens:,} tokens needs {gib(peak)} on a device where "
                f"{gib(budget)} may be used"
            )
        if not problem and candidate.offload:
            problem = self._host_problem(candidate)
        return Prediction(candidate, seconds / factor, peak, budget, 0.0, measured, problem)

    def _host_problem(self, candidate: Candidate) -> str:
        """Why the host cannot hold the optimizer state of its ranks; empty when it can."""
        ranks = min(candidate.ranks, self.hardware.devices_per_host)
        own = self.shape.parameters / (candidate.tensor * candidate.shard)
        needed = 8.0 * own * self.needs.trained * ranks
        budget = self.given.selector.memory_fraction * self.hardware.memory_bytes
        if needed <= budget:
            return ""
        return f"the optimizer state of a host's ranks needs {gib(needed)} of its {gib(budget)}"

    def _predict_rollout(self, candidate: Candidate, load: Load) -> Prediction:
        engine, capacity = self._engine(candidate), self._capacity(candidate)
        per_engine = load.episodes / candidate.replicas
        offered = max(1.0, min(per_engine, candidate.running or per_engine))
        rate, measured = self.rate(candidate, load.context, offered)
        peak, budget = engine.total, self._engine_budget(engine)
        if self.device.kind == "cpu":
            peak *= candidate.tensor * candidate.replicas
        problem = self._refused(candidate, load.context, offered)
        needed = max(float(self.max_model_len), self.ahead.longest)
        if not problem and capacity < needed:
            short = needed * kv_bytes_per_token(self.shape, candidate.tensor)
            problem = (
                f"one sequence of {needed:,.0f} tokens needs {gib(short)} of keys and values on "
                f"each device, and beside the weights {gib(engine.kv_cache)} are left"
            )
        if not problem and peak > budget:
            problem = f"the engines need {gib(peak)} where {gib(budget)} may be used"
        seconds = self.roofline.rollout_seconds(candidate, load, rate)
        filled = offered * load.context / capacity if capacity > 0 else math.inf
        return Prediction(candidate, seconds, peak, budget, filled, measured, problem)

    def _engine_budget(self, engine: Memory) -> float:
        if self.device.kind == "cpu":
            return self.given.selector.memory_fraction * self.hardware.memory_bytes
        share = self.given.rollout.vllm.gpu_memory_utilization
        return max(share * self.device.memory_bytes, engine.total - engine.kv_cache)

    def rate(self, candidate: Candidate, context: float, offered: float) -> tuple[float, float]:
        """Tokens/s of one engine that is offered so many sequences at once, and how much
        measurement stands behind it (0 to 1)."""
        guess = self._guess(candidate)(context, offered)
        factor, measured = self._correction(candidate)(context, offered)
        return guess * factor, measured

    def _guess(self, candidate: Candidate) -> _Guess:
        return _Guess(self, candidate)

    def _correction(self, candidate: Candidate) -> Correction:
        if candidate.stage not in self._measured_stages:
            return _UNMEASURED
        key = candidate.key
        if key not in self._corrections:
            points = self._points.get(key, [])
            self._corrections[key] = Correction(points, self._guess(candidate))
        return self._corrections[key]

    def _refused(self, candidate: Candidate, context: float, requests: float) -> str:
        if candidate in self._forbidden:
            return "it ran out of memory in this run"
        for point in self._failed:
            if point.key == candidate.key and _at_least(context, requests, point):
                return (
                    f"it ran out of memory at {point.requests:.0f} sequences x "
                    f"{point.context:,.0f} tokens when it was measured"
                )
        return ""


class _Guess:
    """The roofline's tokens/s of one candidate at (context, requests)."""

    def __init__(self, predictor: Predictor, candidate: Candidate) -> None:
        self._predictor, self._candidate = predictor, candidate

    def __call__(self, context: float, requests: float) -> float:
        predictor, layout = self._predictor, self._candidate
        if layout.stage == "rollout":
            capacity = predictor._capacity(layout)
            return predictor.roofline.decode_rate(
                layout.tensor, layout.threads, requests, context, capacity
            )
        load = Load(max(1, round(requests)), context, context, context)
        update, only = predictor.given.update, layout.stage == "reference"
        epochs = 1 if only else update.epochs
        seconds = predictor.roofline.training_seconds(
            layout, load, epochs, epochs * update.minibatches, only
        )
        return load.episodes * context / seconds


_UNMEASURED = Correction([], lambda context, requests: 0.0)
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


def _field(candidate: Candidate, field: str) -> object:
    return getattr(candidate, _FIELDS.get(field, field))


def _at_least(context: float, requests: float, point: ProfilePoint) -> bool:
    if point.key.startswith("rollout"):
        return context * requests >= point.live_tokens
    return context >= point.context


def _coarse(value: float) -> int:
    """The greatest of 1, 2, 3, 4, 6, 8, 12, 16, … that is not above the value; 0 below 1.

    Coarse, so that a growing context does not ask for another engine every iteration.
    """
    if value < 1:
        return 0
    power = 2 ** int(math.log2(value))
    return power + power // 2 if power + power // 2 <= value and power > 1 else power


def gib(size: float) -> str:
    """Such as `12.3 GiB`."""
    return f"{size / 2**30:,.1f} GiB"

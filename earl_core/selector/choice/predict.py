"""Seconds and memory of every candidate: roofline, measurements and memory model together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.load_forecast import loads
from earl_core.selector.choice.selection import SelectionInput, model_length
from earl_core.selector.model.candidates import Candidate, RuledOut
from earl_core.selector.model.catalogue import device_of
from earl_core.selector.model.memory_model import (
    Memory,
    TrainingNeeds,
    engine_memory,
    kv_bytes_per_token,
    kv_capacity_tokens,
    scoring_memory,
    torch_engine_memory,
    training_memory,
)
from earl_core.selector.model.roofline import Load, Roofline
from earl_core.selector.profile.profile_table import Common, Correction, Guess, ProfilePoint
from earl_core.system.errors import EarlError

STAGES = ("rollout", "reference", "update")
"""Stages whose layout is a choice, in their order."""


class Prediction(NamedTuple):
    """One candidate under one load.

    seconds: of the stage, infinite when it cannot run. peak, budget: bytes on one device. filled:
    for engines with a KV cache of fixed size, the share of it that the sequences offered would take
    (above 1 they queue). measured: how much measurement stands behind the seconds, 0 (a guess) to
    1. problem: why the candidate is ruled out; empty when it is not.
    """

    candidate: Candidate
    seconds: float
    peak: float
    budget: float
    filled: float = 0.0
    measured: float = 0.0
    problem: str = ""

    @property
    def allowed(self) -> bool:
        """Whether it can be chosen."""
        return not self.problem and math.isfinite(self.seconds)

    @property
    def guess(self) -> bool:
        """Whether roofline and memory formula say more about it than measurements."""
        return self.measured < 0.5


class NoFeasiblePlan(EarlError):
    """No layout of a stage fits the memory. `nearest`: the candidate that came closest (its `peak`
    and `budget` are bytes on one device), None when no layout is on offer, for reasons in `out`."""

    def __init__(
        self, stage: str, nearest: Prediction | None, out: Sequence[RuledOut] = ()
    ) -> None:
        self.stage, self.nearest = stage, nearest
        if nearest is None:
            kinds = {re.sub(r"\d+", "", o.reason): f"{o.label}: {o.reason}" for o in out}
            super().__init__(f"no layout of the {stage} is on offer: {'; '.join(kinds.values())}")
            return
        why = f": {nearest.candidate.label}: {nearest.problem}"
        super().__init__(
            f"no layout of the {stage} fits the memory{why}. Add devices or memory, lower "
            "rollout.max_model_len if it is larger than needed, or free what selector.fixed_fields "
            "and selector.tensor_parallel hold"
        )


class Predictor:
    """Everything about one `SelectionInput` that its candidates share.

    now, ahead: the load of the next iteration, and that at the end of the forecast, which every
    candidate must fit. forbidden: what ran out of memory in this run under no more than that.
    roofline: another one than the default, for comparisons.
    """

    def __init__(self, given: SelectionInput, roofline: Roofline | None = None) -> None:
        self.given = given
        self.shape, self.hardware = given.model.sizes(), given.hardware
        self.device = device_of(given.hardware)
        self.roofline = roofline or Roofline(self.shape, self.device, self.hardware)
        cpu = self.device.kind == "cpu"
        self.now, self.ahead = loads(given)
        mixed = given.update.precision == "bf16"
        self.needs = _answering(TrainingNeeds(mixed, given.trained_share, cpu), self.ahead)
        # Before anything was played the load is a guess from what engines are first built for.
        expected = self.ahead.longest if given.statistics.context_max else 0.0
        self.max_model_len, self.length_reason = model_length(given, expected)
        self._value = 4 if given.rollout.dtype == "float32" else 2
        self._torch_engine = given.rollout.engine == "torch"
        self._points = given.profile.by_key()
        self._failed = [p for p in given.profile.points if p.out_of_memory]
        self._measured_stages = {key.split()[0] for key in self._points}
        self._corrections: dict[str, Correction] = {}
        self._commons: dict[str, Common] = {}
        self._correctors = {stage: given.calibration.corrector(stage) for stage in STAGES}
        self._starving: dict[str, float] = {}
        self._budgets = {stage: self._budget(stage) for stage in STAGES}
        self._peaks: dict[Candidate, float] = {}
        self._engines: dict[tuple[int, float, Load], Memory] = {}
        self.forbidden = frozenset(self._forbidden())

    def candidate_of(self, deployment: StageDeployment) -> Candidate:
        """The candidate behind a part of a plan; on GPUs threads are no part of the choice."""
        candidate = Candidate.of(deployment)
        return candidate._replace(threads=1) if self.hardware.gpus else candidate

    def measured(self, stage: str) -> bool:
        """Whether the profile has anything of this stage."""
        return stage in self._measured_stages

    # Memory

    def budget(self, stage: str) -> float:
        """Bytes that the stage may use: of one device; on a CPU, all its processes together, what
        others hold of the host taken off."""
        return self._budgets[stage]

    def _budget(self, stage: str) -> float:
        share = self.given.selector.memory_fraction
        if self.device.kind == "gpu":
            return share * self.device.memory_bytes
        reserved = self.given.reserved_bytes.get(stage, 0.0)
        return max(1.0, share * self.hardware.memory_bytes - reserved)

    def _engine(self, candidate: Candidate, load: Load) -> Memory:
        sequences = load.episodes / candidate.replicas
        sequences = math.ceil(min(sequences, candidate.running or sequences))
        place = candidate.tensor, sequences if self._torch_engine else candidate.running, load
        if place not in self._engines:
            self._engines[place] = self._engine_memory(candidate, load, sequences)
        return self._engines[place]

    def _engine_memory(self, candidate: Candidate, load: Load, sequences: float) -> Memory:
        cpu = self.device.kind == "cpu"
        if self._torch_engine:
            return torch_engine_memory(self.shape, sequences, load.longest, self._value, cpu)
        vllm = self.given.rollout.vllm
        share = (vllm.kv_cache_gib or 2) * 2.0**30 if cpu else vllm.gpu_memory_utilization
        return engine_memory(self.shape, self.device, candidate, share, self._value)

    def capacity(self, candidate: Candidate) -> float:
        """Tokens that one engine's cache holds. The torch engine's has no size of its own: what it
        grows to is part of the engine's peak."""
        if self._torch_engine:
            return _ENDLESS
        engine = self._engine(candidate, self.ahead)
        return kv_capacity_tokens(self.shape, engine, candidate.tensor, self._value)

    def formula_peak(self, candidate: Candidate, load: Load) -> float:
        """Bytes on one device by formula alone: what `Peak.predicted` of a measurement is."""
        if candidate.stage == "rollout":
            return self._engine(candidate, load).total
        model = scoring_memory if candidate.stage == "reference" else training_memory
        needs = self.needs if load is self.ahead else _answering(self.needs, load)
        return model(self.shape, self._filled(candidate, load), load.longest, needs).total

    def _filled(self, candidate: Candidate, load: Load) -> Candidate:
        """With no more tokens in a microbatch than a rank has of a minibatch: a budget that is
        never filled takes no memory until contexts have grown to fill it."""
        steps = 1 if candidate.stage == "reference" else self.given.update.minibatches
        share = math.ceil(load.episodes * load.context / (steps * candidate.data_parallel))
        return candidate._replace(microbatch=min(candidate.microbatch, share))

    def peak(self, candidate: Candidate, load: Load) -> float:
        """Bytes on one device, calibrated by measured peaks."""
        formula = self.formula_peak(candidate, load)
        return self._correctors[candidate.stage](formula) if self._grows(candidate) else formula

    def stage_peak(self, candidate: Candidate) -> float:
        """The peak at the end of the forecast, which `budget` is for: calibrated, of one device, on
        a CPU of all the stage's processes."""
        peak = self._peaks.get(candidate)
        if peak is None:
            peak = self.peak(candidate, self.ahead)
            if self.device.kind == "cpu":
                peak *= candidate.ranks
            self._peaks[candidate] = peak
        return peak

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate stays within the stage's budget, and below what ran out of memory
        in this run."""
        if self.stage_peak(candidate) > self._budgets[candidate.stage]:
            return False
        return not self._starved(candidate)

    def _forbidden(self) -> Iterator[Candidate]:
        """What ran out of memory in this run, where the load ahead is not a smaller one."""
        for failed in self.given.forbidden:
            candidate = self.candidate_of(failed.deployment)
            if not self._grows(candidate) or (
                self.formula_peak(candidate, self.ahead) >= failed.beyond_bytes
            ):
                yield candidate

    def _starved(self, candidate: Candidate) -> bool:
        """Whether it ran out of memory in this run, or another did whose formula says no more."""
        if not self.forbidden:
            return False
        if candidate in self.forbidden:
            return True
        stage = candidate.stage
        if stage not in self._starving:
            failed = [c for c in self.forbidden if c.stage == stage and self._grows(c)]
            sizes = (self._formula(each) for each in failed)
            self._starving[stage] = min(sizes, default=math.inf)
        least = self._starving[stage]
        return least < math.inf and self._grows(candidate) and self._formula(candidate) >= least

    def _formula(self, candidate: Candidate) -> float:
        ranks = candidate.ranks if self.device.kind == "cpu" else 1
        return ranks * self.formula_peak(candidate, self.ahead)

    def _grows(self, candidate: Candidate) -> bool:
        """Whether its memory follows from its load: vLLM takes the share of a GPU that it is given,
        no more and no less."""
        return candidate.stage != "rollout" or self.device.kind == "cpu" or self._torch_engine

    def _short_of(self, stage: str, peak: float, budget: float) -> str:
        """Such as `needs 3.0 GiB on a device where 2.0 GiB may be used`."""
        where = "on a device where"
        if self.device.kind == "cpu":
            where = f"on this host of {gib(self.hardware.memory_bytes)}, where"
        text = f"needs {gib(peak)} {where} {gib(budget)} may be used"
        reserved = self.given.reserved_bytes.get(stage, 0.0)
        if reserved and self.device.kind == "cpu":
            text += f", for others hold {gib(reserved)}"
        return text

    # Predictions

    def predict(self, candidate: Candidate, load: Load) -> Prediction:
        """Seconds and memory under a load; whether it fits is judged at the forecast one."""
        if candidate.stage == "rollout":
            return self._predict_rollout(candidate, load)
        peak, budget = self.stage_peak(candidate), self._budgets[candidate.stage]
        epochs, steps = self.given.update.epochs, self.given.update.minibatches
        only = candidate.stage == "reference"
        seconds = self.roofline.training_seconds(
            candidate, load, 1 if only else epochs, epochs * steps, only
        )
        factor, measured = self.correction(candidate)(load.context, float(load.episodes))
        problem = self._refused(candidate, load.context, float(load.episodes))
        if not problem and peak > budget:
            filled = self._filled(candidate, self.ahead).microbatch
            tokens = max(filled, round(self.ahead.longest))
            short = self._short_of(candidate.stage, peak, budget)
            problem = f"a microbatch of {tokens:,} tokens {short}"
        if not problem and candidate.offload:
            problem = self._host_problem(candidate)
        return Prediction(candidate, seconds / factor, peak, budget, 0.0, measured, problem)

    def _host_problem(self, candidate: Candidate) -> str:
        """Why the host cannot hold the optimizer state of its ranks; empty when it can."""
        ranks = min(candidate.ranks, self.hardware.devices_per_host)
        own = self.shape.parameters / (candidate.tensor * candidate.parts)
        needed = 8.0 * own * self.needs.trained * ranks
        budget = self.given.selector.memory_fraction * self.hardware.memory_bytes
        if needed <= budget:
            return ""
        return f"the optimizer state of a host's ranks needs {gib(needed)} of its {gib(budget)}"

    def _predict_rollout(self, candidate: Candidate, load: Load) -> Prediction:
        engine, capacity = self._engine(candidate, self.ahead), self.capacity(candidate)
        per_engine = load.episodes / candidate.replicas
        offered = max(1.0, min(per_engine, candidate.running or per_engine))
        rate, measured = self.rate(candidate, load.context, offered)
        peak, budget = self.stage_peak(candidate), self._engine_budget(engine)
        problem = self._refused(candidate, load.context, offered)
        needed = max(self.ahead.longest, float(self.max_model_len))
        if not problem and peak > budget:
            engines = f"{candidate.replicas} engines" if candidate.replicas > 1 else "one engine"
            problem = f"running {engines} {self._short_of('rollout', peak, budget)}"
        if not problem and capacity < needed:
            short = needed * kv_bytes_per_token(self.shape, candidate.tensor, self._value)
            left = capacity * kv_bytes_per_token(self.shape, candidate.tensor, self._value)
            problem = (
                f"one sequence of {needed:,.0f} tokens needs {gib(short)} of keys and values on "
                f"each device, and beside the weights {gib(left)} are left"
            )
        seconds = self.roofline.rollout_seconds(candidate, load, rate)
        filled = offered * load.context / capacity if capacity > 0 else math.inf
        if self._torch_engine:
            filled = 0.0
        return Prediction(candidate, seconds, peak, budget, filled, measured, problem)

    def _engine_budget(self, engine: Memory) -> float:
        if self.device.kind == "cpu" or self._torch_engine:
            return self._budgets["rollout"]
        share = self.given.rollout.vllm.gpu_memory_utilization
        return max(share * self.device.memory_bytes, engine.total - engine.kv_cache)

    def rate(self, candidate: Candidate, context: float, offered: float) -> tuple[float, float]:
        """Tokens/s of one engine that is offered so many sequences at once, and how much
        measurement stands behind it (0 to 1)."""
        guess = self.guess(candidate)(context, offered)
        factor, measured = self.correction(candidate)(context, offered)
        return guess * factor, measured

    def guess(self, candidate: Candidate) -> Guess:
        """The roofline's tokens/s of the candidate, by load: what `rate` corrects."""
        return _Guess(self, candidate)

    def correction(self, candidate: Candidate) -> Correction:
        """Measured over guessed rate of the candidate, by load."""
        if candidate.stage not in self._measured_stages:
            return _UNMEASURED
        key = candidate.key
        if key not in self._corrections:
            points, guess = self._points.get(key, []), self.guess(candidate)
            self._corrections[key] = Correction(points, guess, self._common(candidate.stage))
        return self._corrections[key]

    def _common(self, stage: str) -> Common:
        if stage not in self._commons:
            self._commons[stage] = Common(
                [
                    (points, self.guess(Candidate.of_key(key, self.hardware)))
                    for key, points in self._points.items()
                    if key.split()[0] == stage
                ]
            )
        return self._commons[stage]

    def _refused(self, candidate: Candidate, context: float, requests: float) -> str:
        if self._starved(candidate):
            peak, budget = self.stage_peak(candidate), self._budgets[candidate.stage]
            what = "it" if candidate in self.forbidden else "a layout that needs no more"
            return (
                f"{what} ran out of memory in this run, where {gib(budget)} may be used and "
                f"{gib(peak)} are predicted"
            )
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
            return predictor.roofline.decode_rate(
                layout.tensor, layout.threads, requests, context, predictor.capacity(layout)
            )
        written = context * predictor.now.generated / predictor.now.context
        load = Load(max(1, round(requests)), context, context, written)
        update, only = predictor.given.update, layout.stage == "reference"
        epochs = 1 if only else update.epochs
        seconds = predictor.roofline.training_seconds(
            layout, load, epochs, epochs * update.minibatches, only
        )
        return load.episodes * context / seconds


_ENDLESS = 2.0**62
_UNMEASURED = Correction([], lambda context, requests: 0.0)


def _answering(needs: TrainingNeeds, load: Load) -> TrainingNeeds:
    return needs._replace(answered=min(1.0, load.generated / load.context))


def _at_least(context: float, requests: float, point: ProfilePoint) -> bool:
    if point.key.startswith("rollout"):
        return context * requests >= point.live_tokens
    return context >= point.context


def gib(size: float) -> str:
    """Such as `12.3 GiB`, or `700 MiB` where that says more."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"

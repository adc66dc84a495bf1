"""Seconds and memory of every candidate under the load that the next iterations will bring:
roofline, measurements and memory model together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import fmean

from earl_core.deployment.placement import Division
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE, STAGES, TRAINED
from earl_core.selector.choice.expected_load import computed_load, loads, trained_load
from earl_core.selector.choice.prediction import Prediction
from earl_core.selector.choice.selection import SelectionInput, model_length
from earl_core.selector.model.candidates import candidate_of, memory_model
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory import Memory, TrainingNeeds
from earl_core.selector.model.memory_model import gib, kv_bytes_per_token
from earl_core.selector.model.roofline import Load, Roofline
from earl_core.selector.model.scoring import Scoring
from earl_core.selector.profile.profile_table import (
    Common,
    Correction,
    Guess,
    candidate_of_key,
    key_of,
)


class Predictor:
    """Everything about one `SelectionInput` that its candidates share.

    now, ahead: the load of the next iteration, and that at the end of the forecast, which every
    candidate must fit. configured: what `fixed` would take. forbidden: what ran out of memory in
    this run under no more than that. roofline: another one than the default, for comparisons.
    division: of the devices; None: the configured one.
    """

    def __init__(
        self,
        given: SelectionInput,
        roofline: Roofline | None = None,
        division: Division | None = None,
    ) -> None:
        self.division = division or given.stages.division
        stages = given.stages.model_copy(update={"placement": self.division.placement})
        given = given.model_copy(update={"stages": stages})
        self.given, self.shape, self.hardware = given, given.model, given.hardware
        self.memory = memory_model(self.shape, self.hardware)
        self._value = given.rollout.value_bytes
        self.roofline = roofline or Roofline(
            self.shape, device_of(self.hardware), self.hardware, self._value
        )
        where = self.hardware, self._value, roofline
        held = {stage: given.models_of(stage) for stage in ("reference", "value", "critic")}
        self._apart = {stage: Scoring(models, *where) for stage, models in held.items()}
        self.configured = dict(zip(("rollout", "update"), given.configured(), strict=True))
        self.now, self.ahead = loads(given)
        seen = given.statistics
        self._ahead = {
            each: computed_load(seen, each, trained_load(given, each, self.ahead), min)
            for each in SELECTABLE
        }
        # Before anything was played the load is a guess from what engines are first built for.
        expected = self.ahead.longest if given.statistics.context_max else 0.0
        self.max_model_len, self.length_reason = model_length(given, expected)
        self._torch_engine = given.rollout.engine == "torch"
        # Only where devices are divided has one mesh more or fewer of them.
        self._divided = self.hardware.devices if given.staleness else 0
        self._points = given.profile.by_key()
        self._failed = [p for p in given.profile.points if p.out_of_memory]
        self._measured_stages = {key.split()[0] for key in self._points}
        self._corrections: dict[str, Correction] = {}
        self._commons: dict[str, Common] = {}
        self._correctors = {stage: given.calibration.corrector(stage) for stage in SELECTABLE}
        self._starving: dict[str, float] = {}
        budget = partial(self.memory.budget, given.selector.memory_fraction)
        self._budgets = {stage: budget(self._reserved(stage)) for stage in SELECTABLE}
        self._peaks: dict[StageDeployment, float] = {}
        self._engines: dict[tuple[int, float, Load], Memory] = {}
        self.forbidden = frozenset(self._forbidden())

    def candidate_of(self, deployment: StageDeployment) -> StageDeployment:
        """The candidate behind a part of a plan."""
        return candidate_of(deployment, self.hardware)

    def part(self, stage: str) -> Hardware:
        """The devices that the stage may be laid out on."""
        engines, hosts = self.division.engine_devices, self.hardware.hosts
        if not engines:
            return self.hardware
        devices = engines if stage == "rollout" else self.hardware.devices_per_host - engines
        sizes = {"gpus": devices * hosts} if self.hardware.gpus else {"cpu_cores": devices}
        return self.hardware.model_copy(update=sizes)

    def measured(self, stage: str) -> bool:
        """Tell whether the profile has anything of this stage."""
        return stage in self._measured_stages

    # Memory
    def budget(self, stage: str) -> float:
        """Bytes that the stage may use: of one device; on a CPU, all its processes together, what
        others hold of the host taken off."""
        return self._budgets[stage]

    def _engine(self, candidate: StageDeployment, load: Load) -> Memory:
        sequences = math.ceil(load.offered(candidate))
        size = sequences if self._torch_engine else candidate.max_running_requests
        place = candidate.tensor_parallel, size, load
        if place not in self._engines:
            self._engines[place] = (
                self.memory.torch_engine(
                    sequences, load.longest, self._value, self.given.rollout.drafts
                )
                if self._torch_engine
                else self.memory.vllm(candidate, self.given.rollout.vllm, self._value)
            )
        return self._engines[place]

    def _kv_bytes(self, candidate: StageDeployment) -> float:
        return kv_bytes_per_token(self.shape, candidate.tensor_parallel, self._value)

    def capacity(self, candidate: StageDeployment) -> float:
        """Tokens that one engine's cache holds. The torch engine's has no size of its own: what it
        grows to is part of the engine's peak."""
        if self._torch_engine:
            return _ENDLESS
        return self._engine(candidate, self.ahead).kv_cache / self._kv_bytes(candidate)

    def own_part(self, candidate: StageDeployment) -> float:
        """Bytes on one device of what a rank holds of the parameters, whatever the load: of an
        engine its weights; of the update weights, gradients and two Adam moments."""
        if candidate.stage == "rollout":
            return self.memory.engine_weights(candidate.tensor_parallel, self._value)
        return self._of(candidate).memory.state(candidate, self.given.update.mixed).total

    def formula_peak(self, candidate: StageDeployment, load: Load) -> float:
        """Bytes on one device by formula alone: what `Peak.predicted` of a measurement is."""
        if candidate.stage == "rollout":
            return self._engine(candidate, load).total
        needs = TrainingNeeds(
            mixed=self.given.update.mixed,
            compiled=self.given.update.compiles(self.hardware.gpus > 0),
            answered=min(1.0, load.generated / load.context),
        )
        filled = self._filled(candidate, load)
        if STAGES[candidate.stage].scores:
            return self._apart[candidate.stage].peak(filled, load.longest, needs)
        return self._of(candidate).memory.training(filled, load.longest, needs).total

    def _of(self, candidate: StageDeployment) -> Scoring | Predictor:
        """Return what has the memory and the roofline of a candidate's model."""
        return self._apart.get(candidate.stage, self)

    def _filled(self, candidate: StageDeployment, load: Load) -> StageDeployment:
        """Limit a microbatch to the tokens that a rank has of a minibatch: a budget that is never
        filled takes no memory until contexts have grown to fill it."""
        steps = self.given.steps_of(candidate.stage)
        share = math.ceil(load.episodes * load.context / (steps * candidate.data_parallel))
        asked = candidate.max_tokens_per_microbatch
        return candidate._replace(max_tokens_per_microbatch=min(asked, share))

    def peak(self, candidate: StageDeployment, load: Load) -> float:
        """Bytes on one device, calibrated by measured peaks."""
        formula = self.formula_peak(candidate, load)
        return self._correctors[candidate.stage](formula) if self._grows(candidate) else formula

    def sharers(self, candidate: StageDeployment) -> int:
        """Ranks whose peaks add up in one budget: on a CPU all of the stage."""
        return candidate.ranks if self.memory.shared else 1

    def stage_peak(self, candidate: StageDeployment) -> float:
        """The peak at the end of the forecast, which `budget` is for: calibrated, of one device, on
        a CPU of all the stage's processes."""
        if candidate not in self._peaks:
            peak = self.peak(candidate, self._ahead[candidate.stage])
            self._peaks[candidate] = peak * self.sharers(candidate)
        return self._peaks[candidate]

    def fits(self, candidate: StageDeployment) -> bool:
        """Tell whether the candidate stays within the stage's budget, and below the candidates that
        ran out of memory in this run."""
        within = self.stage_peak(candidate) <= self._budgets[candidate.stage]
        return within and not self._starved(candidate)

    def is_forbidden(self, candidate: StageDeployment) -> bool:
        """Tell whether the candidate ran out of memory in this run, or another that builds the same
        vLLM engine: it is built for the configured sequences, and a lower limit lets fewer in."""
        if candidate.stage != "rollout" or self._torch_engine:
            return candidate in self.forbidden
        alike = {each._replace(max_running_requests=0) for each in self.forbidden}
        return candidate._replace(max_running_requests=0) in alike

    def _forbidden(self) -> Iterator[StageDeployment]:
        """Yield the candidates that ran out of memory in this run, where the load ahead is not a
        smaller one."""
        for failed in self.given.forbidden:
            candidate = self.candidate_of(failed.deployment)
            if not self._grows(candidate) or (
                self._formula(candidate) >= self.sharers(candidate) * failed.beyond_bytes
            ):
                yield candidate

    def _starved(self, candidate: StageDeployment) -> bool:
        """Tell whether the candidate ran out of memory in this run, or another did whose formula
        says no more."""
        if not self.forbidden or self.is_forbidden(candidate):
            return bool(self.forbidden)
        stage = candidate.stage
        if stage not in self._starving:
            failed = [c for c in self.forbidden if c.stage == stage and self._grows(c)]
            self._starving[stage] = min(map(self._formula, failed), default=math.inf)
        least = self._starving[stage]
        return least < math.inf and self._grows(candidate) and self._formula(candidate) >= least

    def _formula(self, candidate: StageDeployment) -> float:
        ahead = self._ahead[candidate.stage]
        return self.sharers(candidate) * self.formula_peak(candidate, ahead)

    def _grows(self, candidate: StageDeployment) -> bool:
        """Tell whether the candidate's memory follows from its load: vLLM takes the share of a GPU
        that it is given, no more and no less."""
        return candidate.stage != "rollout" or self.memory.shared or self._torch_engine

    def _short_of(self, stage: str, peak: float, budget: float) -> str:
        return self.memory.short_of(peak, budget, self._reserved(stage))

    def _reserved(self, stage: str) -> float:
        """Return the bytes that others than the stage's tensors hold; until that was measured on a
        GPU, those of the libraries of all processes that take turns there."""
        given = self.given
        others = self.division.placed.gives_way(stage)
        turns = [role for role in (stage, *others) if given.chosen(role)]
        return given.reserved_bytes.get(stage, self.memory.outside * len(turns))

    # Predictions

    def predict(self, candidate: StageDeployment, load: Load) -> Prediction:
        """Seconds and memory under a load; whether it fits is judged at the forecast one."""
        if candidate.stage == "rollout":
            return self._predict_rollout(candidate, load)
        load = trained_load(self.given, candidate.stage, load)
        load = computed_load(self.given.statistics, candidate.stage, load, fmean)
        peak, budget = self.stage_peak(candidate), self._budgets[candidate.stage]
        factor, measured = self.correction(candidate)(load.context, float(load.episodes))
        problem = self._refused(candidate, load.context, float(load.episodes))
        if not problem and peak > budget:
            ahead = self._ahead[candidate.stage]
            filled = self._filled(candidate, ahead).max_tokens_per_microbatch
            tokens = max(filled, round(self.ahead.longest))
            short = self._short_of(candidate.stage, peak, budget)
            problem = f"a microbatch of {tokens:,} tokens {short}"
        if not problem and candidate.stage in TRAINED and not self.memory.shared:
            problem = self._host_problem(candidate)
        seconds = self._training_seconds(candidate, load) / factor
        return Prediction(candidate, seconds, peak, budget, 0.0, measured, problem)

    def _training_seconds(self, candidate: StageDeployment, load: Load) -> float:
        """The roofline's, of an update or of scoring alone."""
        update, only = self.given.settings_of(candidate.stage), STAGES[candidate.stage].scores
        epochs, value = 1 if only else update.epochs, 2 if update.mixed else 4
        steps = update.epochs * update.minibatches
        roofline = self._of(candidate).roofline
        return roofline.training_seconds(candidate, load, epochs, steps, only, value)

    def _host_problem(self, candidate: StageDeployment) -> str:
        """Return the reason why a host of GPUs cannot hold what its ranks leave there for the
        engines' time, and engines of an adapter for its own, beside published versions; or ""."""
        ranks = min(candidate.ranks, self.hardware.devices_per_host)
        state = candidate, self.given.update.mixed
        needed = ranks * self.memory.resting(*state)
        if self.given.critic is not None:
            needed += ranks * self._apart["critic"].memory.resting(*state)
        needed += self.given.weight_versions * self._value * self.shape.trained_parameters
        if self.shape.adapter is not None:
            engines = math.ceil(self.configured["rollout"].replicas / self.hardware.hosts)
            needed += engines * self._value * self.shape.parameters
        budget = self.given.selector.memory_fraction * self.hardware.memory_bytes
        if needed <= budget or not self.division.placed.gives_way("rollout"):
            return ""
        count = str(self.given.weight_versions).replace("2", "two")
        return (
            f"while engines have the GPUs, its weights and optimizer state and {count} published "
            f"versions need {gib(needed)} of a host's {gib(budget)}"
        )

    def _predict_rollout(self, candidate: StageDeployment, load: Load) -> Prediction:
        capacity, offered = self.capacity(candidate), load.offered(candidate)
        rate, measured = self.rate(candidate, load.context, offered)
        peak, budget = self.stage_peak(candidate), self._engine_budget(candidate)
        problem = self._refused(candidate, load.context, offered)
        needed = max(self.ahead.longest, float(self.max_model_len))
        if not problem and peak > budget:
            engines = f"{candidate.replicas} engines" if candidate.replicas > 1 else "one engine"
            problem = f"running {engines} {self._short_of('rollout', peak, budget)}"
        if not problem and capacity < needed:
            token = self._kv_bytes(candidate)
            problem = (
                f"one sequence of {needed:,.0f} tokens needs {gib(needed * token)} of keys and "
                f"values on each device, and beside the weights {gib(capacity * token)} are left"
            )
        waves = fmean(self.given.statistics.played_share or (1.0,))
        seconds = waves * self.roofline.rollout_seconds(candidate, load, rate)
        filled = offered * load.context / capacity if capacity > 0 else math.inf
        filled = 0.0 if self._torch_engine else filled
        row = Prediction(candidate, seconds, peak, budget, filled, measured, problem)
        return self._overlapped(row, load) if self.given.staleness else row

    def _overlapped(self, row: Prediction, load: Load) -> Prediction:
        """The same of a rollout that overlaps with updates: one engine ends last, with the longest
        episode, and the others begin what follows meanwhile."""
        candidate = row.candidate
        share = load.episodes / candidate.replicas
        rounds = max(1.0, share / (candidate.max_running_requests or share))
        wait = load.turns * load.tool_wait
        rate = self.rate(candidate, load.longest, 1.0)[0]
        written = load.longest * min(1.0, load.generated / load.context)
        whole = max(row.seconds, written / rate + wait if rate > 0 else math.inf)
        if self.given.streams:
            # Nobody waits for it: it goes on under the next weights.
            return row._replace(busy=row.seconds, whole=whole, waiting=rounds * wait)
        busy = row.seconds + (whole - row.seconds) / candidate.replicas
        # Engines that may not begin what follows wait for the last one.
        idle = self.given.barrier_share * (whole - busy) if math.isfinite(whole) else 0.0
        waiting = rounds * wait + idle
        return row._replace(seconds=whole, busy=busy + idle, whole=whole, waiting=waiting)

    def _engine_budget(self, candidate: StageDeployment) -> float:
        if self._grows(candidate):
            return self._budgets["rollout"]
        engine = self._engine(candidate, self.ahead)
        share = self.given.rollout.vllm.gpu_memory_utilization
        return max(share * self.memory.device.memory_bytes, engine.total - engine.kv_cache)

    def rate(
        self, candidate: StageDeployment, context: float, offered: float
    ) -> tuple[float, float]:
        """Tokens/s of one engine that is offered so many sequences at once, and how much
        measurement stands behind it (0 to 1)."""
        factor, measured = self.correction(candidate)(context, offered)
        return self._guessed(candidate, context, offered) * factor, measured

    def guess(self, candidate: StageDeployment) -> Guess:
        """The roofline's tokens/s of the candidate, by load: what `rate` corrects."""
        return partial(self._guessed, candidate)

    def _guessed(self, candidate: StageDeployment, context: float, requests: float) -> float:
        if candidate.stage == "rollout":
            tensor, threads = candidate.tensor_parallel, candidate.threads
            capacity = self.capacity(candidate)
            return self.roofline.decode_rate(tensor, threads, requests, context, capacity)
        written = context * self.now.generated / self.now.context
        load = Load(max(1, round(requests)), context, context, written)
        return load.episodes * context / self._training_seconds(candidate, load)

    def correction(self, candidate: StageDeployment) -> Correction:
        """Measured over guessed rate of the candidate, by load."""
        if candidate.stage not in self._measured_stages:
            return _UNMEASURED
        key = key_of(candidate, self._divided)
        if key not in self._corrections:
            points, guess = self._points.get(key, []), self.guess(candidate)
            self._corrections[key] = Correction(points, guess, self._common(candidate.stage))
        return self._corrections[key]

    def _common(self, stage: str) -> Common:
        if stage not in self._commons:
            self._commons[stage] = Common(
                [
                    (points, self.guess(candidate_of_key(key, self.hardware.devices)))
                    for key, points in self._points.items()
                    if key.split()[0] == stage
                ]
            )
        return self._commons[stage]

    def _refused(self, candidate: StageDeployment, context: float, requests: float) -> str:
        if self._starved(candidate):
            peak, budget = self.stage_peak(candidate), self._budgets[candidate.stage]
            what = "it" if self.is_forbidden(candidate) else "one that needs no more"
            return (
                f"{what} ran out of memory in this run, where {gib(budget)} are available and "
                f"{gib(peak)} are predicted"
            )
        key = key_of(candidate, self._divided) if self._failed else ""
        for point in self._failed:
            if point.key == key and point.at_most(context, requests):
                return (
                    f"it ran out of memory at {point.requests:.0f} sequences x "
                    f"{point.context:,.0f} tokens when it was measured"
                )
        return ""


_ENDLESS = 2.0**62
_UNMEASURED = Correction([], lambda context, requests: 0.0)

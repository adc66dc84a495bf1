"""The policy learner: owns the model and its optimizer, scores samples and applies updates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from earl_core.algorithms.mismatch import UpdateRefused
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.imitation import ImitationConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner import memory
from earl_core.learner.attention.context_parallel import gather_trained
from earl_core.learner.attention.recurrence import state_widths
from earl_core.learner.compiled_layers import compile_layers, compiling
from earl_core.learner.data.packing import FILLER, TrainingSample, plan_rows
from earl_core.learner.data.prefixes import as_samples
from earl_core.learner.data.samples import Minibatch, gathered_table, split_table
from earl_core.learner.data.zero_advantage import Skipped
from earl_core.learner.deterministic import choose_algorithms
from earl_core.learner.imitation import aim_of
from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.loading import load_policy
from earl_core.learner.microbatches import Algorithm, FedMicrobatch, Feed
from earl_core.learner.model import checkpoint_activations
from earl_core.learner.parallel.gradients import Gradients
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.parallel_model import ParallelModel
from earl_core.learner.router_balance import RouterBalance
from earl_core.learner.routing_tally import RoutingTally
from earl_core.learner.state.checkpoint import (
    read_training_state,
    try_training_state,
    write_training_state,
)
from earl_core.learner.state.optimizer import PolicyOptimizer
from earl_core.learner.update_metrics import UpdateMetrics
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.pretrained.model_directory import load_tokenizer
from earl_core.system.memory import keep_freed_memory
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.device_speed import bf16_is_fast
from earl_core.weights.probe import Prefixes, ProbedRow

StepHook = Callable[[int], None]

BeforeStep = Callable[[Mapping[str, float]], None]
"""Gets the `mismatch_*` metrics of a minibatch; what it raises stops the update."""


class PolicyLearner:
    """Trains one causal language model, or a critic, alone or as one rank of a mesh.

    model: what to load. temperature: that of the rollout; logits are divided by it. iterations,
    seed: of the run. imitation: its first iterations, if they imitate. resting: how many train
    nothing. mesh: the ranks that train together; all call each method alike, those of one replica
    with the same samples, and compute what one process would from all. logits_chunk_tokens:
    positions whose logits exist at a time; None: any. offload_optimizer: to the host's memory.

    Raises ConfigError for a model that cannot be trained (on this mesh) or an unknown algorithm.
    """

    def __init__(
        self,
        model: ModelConfig,
        update: UpdateConfig,
        algorithm: AlgorithmConfig | Algorithm,
        *,
        temperature: float = 1.0,
        iterations: int = 1,
        seed: int = 0,
        imitation: ImitationConfig | None = None,
        resting: int = 0,
        mesh: UpdateMesh | None = None,
        logits_chunk_tokens: int | None = None,
        offload_optimizer: bool = False,
    ) -> None:
        choose_algorithms(deterministic=update.deterministic)
        mesh = mesh or create_mesh()
        if mesh.device.type == "cpu":
            keep_freed_memory()
        if update.threads:
            torch.set_num_threads(update.threads)
        self.config, self.temperature = update, temperature
        self.iterations, self.seed = iterations, seed
        self._algorithm = algorithm if isinstance(algorithm, Algorithm) else Algorithm(algorithm)
        self._begins, self._compiled = (imitation, resting), compiling(update, mesh.device)
        parallel = load_policy(
            model,
            mesh,
            mixed=bf16_is_fast(mesh.device) if update.precision == "auto" else update.mixed,
            chunk_tokens=logits_chunk_tokens,
            seed=seed,
            values=self._algorithm.of_values,
        )
        self.tokenizer = load_tokenizer(model)
        self.optimizer = PolicyOptimizer((), update, offload=offload_optimizer)
        self.adopt(parallel, {})

    def adopt(
        self, parallel: ParallelModel, state: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Go on with this model, on its mesh, and with this optimizer state, by parameter name."""
        self.parallel = parallel
        parallel.module.scoring.compiled = self._compiled
        if self._compiled:
            compile_layers(parallel.model)
        checkpoint_activations(parallel.model, self.config.activation_checkpointing)
        self.optimizer.bind(parallel.trained.items())
        for name, tensors in state.items():
            self.optimizer.load_state(name, tensors)
        self._gradients = Gradients(parallel.trained.values(), self.mesh)
        self._feed = Feed(self.device, self.mesh, state_widths(self.model))
        self._ranks = Ranks(self.mesh, "data_parallel")
        # Ranks with other samples count on this one even where it has none.
        self._others_wait = self.mesh.deployment.data_parallel > 1

    @property
    def model(self) -> PreTrainedModel:
        """The model under its usual parameter names; what is on other ranks is not in them."""
        return self.parallel.model

    @property
    def mesh(self) -> UpdateMesh:
        """The ranks that train together, and this one's place among them."""
        return self.parallel.mesh

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a microbatch, at most, unless a sample alone has more."""
        return self.config.tokens_per_microbatch(self.device.type == "cuda")

    @property
    def device(self) -> torch.device:
        """Device that the model lives on."""
        return self.mesh.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by state-dict name, tied ones once: plain, or DTensors."""
        return self.model.named_parameters()

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights by state-dict name, tied ones once; not copied. Float32, but what an
        adapter leaves frozen may be bf16.

        Plain tensors, or DTensors where the mesh has cut them.
        """
        return {name: weight.detach() for name, weight in self.named_parameters()}

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[TrainingSample],
        on_progress: Callable[[int, int], None] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Log-probs (a critic's values) of the trained tokens under the weights as they are.

        Returns one float32 [L] per sample of this rank, 0 where the mask is 0: the columns
        `old_logprobs` (of the policy) and `reference_logprobs` (of a frozen one). They are written
        into `out` if it is given, whatever it held. on_progress(done, all) is called after each
        microbatch, counting samples.
        """
        if out is None:
            out = [np.empty(len(sample.tokens), dtype=np.float32) for sample in samples]
        scored = list(out)
        for logprobs_of_row in scored:
            logprobs_of_row[:] = 0.0
        done = 0
        plan = self._plan(samples, range(len(samples)), self._algorithm)
        (count,) = self._levelled([plan])
        with self.parallel.passes():
            for number, fed in enumerate(self._microbatches(samples, plan, count), start=1):
                packed = fed.packed
                with memory.microbatch("score", -1, number, count, packed.tokens.size):
                    if packed.targets.size or self._others_wait:
                        logprobs, _ = self._forward(fed, "none", self.temperature)
                if number > len(plan):
                    continue
                if packed.targets.size:
                    per_row = packed.split_by_row(logprobs.cpu().numpy())
                    for row, values in zip(packed.rows, per_row, strict=True):
                        scored[row][samples[row].loss_mask.astype(bool, copy=False)] = values
                done += len(packed.rows)
                if on_progress is not None:
                    on_progress(done, len(samples))
        return scored

    @torch.no_grad()
    def probe(self, rows: Sequence[Prefixes]) -> tuple[ProbedRow, ...]:
        """Find the likeliest next token after each beginning, at temperature 1, under the weights
        as they are. All ranks are given the same rows."""
        samples = as_samples(rows)
        plan = self._plan(samples, range(len(samples)), self._algorithm)
        found: dict[int, ProbedRow] = {}
        with self.parallel.passes():
            for number, fed in enumerate(self._microbatches(samples, plan, len(plan)), start=1):
                with memory.microbatch("score", -1, number, len(plan), fed.packed.tokens.size):
                    open_ = replace(fed, tensors=replace(fed.tensors, targets=None))
                    logprobs, tokens = self._forward(open_, "none", 1.0)
                assert tokens is not None
                by_row = [fed.packed.split_by_row(t.cpu().numpy()) for t in (tokens, logprobs)]
                for row, *said in zip(fed.packed.rows, *by_row, strict=True):
                    likeliest, scores = (values.tolist() for values in said)
                    given = rows[row].model_dump()
                    found[row] = ProbedRow(**given, likeliest=likeliest, logprobs=scores)
        return tuple(found[row] for row in range(len(rows)))

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        iteration: int,
        skipped: Skipped | None = None,
        before_step: BeforeStep | None = None,
        on_step: StepHook | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        seed: int | None = None,
        rate_factor: float = 1.0,
    ) -> dict[str, float]:
        """Apply one iteration's optimizer steps; returns metrics over all ranks' samples.

        Each epoch visits all samples in `minibatches` parts of whole groups; each part is one
        optimizer step whose gradient does not depend on how it is cut into microbatches, nor on
        which rank has which sample. iteration counts from 0; the first one after those that
        imitate begins with a fresh optimizer. skipped: further samples of the minibatches, equal
        on all ranks, that add nothing to their gradients (see `zero_advantage`); a minibatch of
        nothing else is a step as well. before_step is called before each step of the first epoch,
        on all ranks alike, where anything was measured, on_step(index) after each step, and
        on_progress(trained samples, all samples of this rank) after each microbatch. seed: of the
        order of groups; None: the learner's. rate_factor: of the learning rate.

        Raises ValueError when a column that the algorithm needs is missing, and UpdateRefused, on
        all ranks, before a step that would destroy the weights.
        """
        aim = aim_of(iteration, self.iterations, self.config, self._algorithm, *self._begins)
        rate, seed = aim.learning_rate * rate_factor, self.seed if seed is None else seed
        algorithm = aim.algorithm
        algorithm.check_columns(samples, aim.epochs * aim.minibatches)
        memory.reset_peak()
        self.optimizer.learning_rate = rate
        if aim.fresh:
            self.optimizer.state.clear()
        skipped = skipped or Skipped()
        metrics = UpdateMetrics(rate, RoutingTally(Ranks(self.mesh), algorithm.balance))
        table, own = gathered_table(self._ranks, samples, skipped.table, algorithm.whole_episodes)
        steps = 0
        for epoch in range(aim.epochs):
            minibatches = split_table(
                table, own, aim.minibatches, seed=seed, iteration=iteration, epoch=epoch,
                skipped=len(skipped.table),
            )  # fmt: skip
            plans = [self._plan(samples, each.rows, algorithm) for each in minibatches]
            # Without a sample the gradient is that of a filler: there, and 0.
            counts = [max(1, count) for count in self._levelled(plans)]
            for minibatch, plan, count in zip(minibatches, plans, counts, strict=True):
                self._step(
                    samples, minibatch, plan, count, algorithm,
                    metrics=metrics, iteration=iteration,
                    compared=epoch == 0 and algorithm.comparable(steps),
                    before_step=before_step, report=on_progress,
                )  # fmt: skip
                if on_step is not None:
                    on_step(steps)
                steps += 1
        return metrics.summary(self._ranks, memory.peak_bytes(), skipped, aim.epochs)

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write a training state that `restore` takes; see `checkpoint.write_training_state`."""
        parts: dict[str, Any] = {"optimizer": self.optimizer, "state": state, **self._stored}
        write_training_state(directory, tokenizer=self.tokenizer, **parts)

    def try_saving(self, parent: Path) -> None:
        """Try to write a training state below `parent`, as `checkpoint.try_training_state` does."""
        try_training_state(parent, tokenizer=self.tokenizer, **self._stored)

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a training state, bit for bit; returns the `state` given to `save`. Any
        mesh reads what any other wrote."""
        return read_training_state(directory, optimizer=self.optimizer, **self._stored)

    @property
    def _stored(self) -> dict[str, Any]:
        return {"model": self.model, "mesh": self.mesh, "adapter": self.parallel.adapter}

    @property
    def whole_episodes(self) -> bool:
        """True when the losses of an episode's samples depend on each other."""
        return self._algorithm.whole_episodes

    def _plan(
        self, samples: Sequence[TrainingSample], rows: Sequence[int], algorithm: Algorithm
    ) -> list[list[int]]:
        return plan_rows(samples, rows, self.tokens_per_microbatch, algorithm.whole_episodes)

    def _levelled(self, plans: Sequence[Sequence[object]]) -> list[int]:
        """Count the microbatches of this rank for each plan, so that no other waits."""
        counts = [len(plan) for plan in plans]
        if not self._others_wait:
            return counts
        if self.mesh.group("parameters") is not None or self.mesh.experts is not None:
            # Forward and backward passes wait for ranks that have other samples.
            return self._ranks.most(counts)
        # Without shards the ranks meet after the last microbatch; gradients must be there then.
        return [max(1, count) for count in counts]

    def _microbatches(
        self, samples: Sequence[TrainingSample], plan: Sequence[Sequence[int]], count: int
    ) -> Iterator[FedMicrobatch]:
        """Yield the microbatches of the plan, and fillers until there are `count`."""
        if (missing := count - len(plan)) > 0:
            samples = [*samples, FILLER]
            plan = [*plan, *[[len(samples) - 1]] * missing]
        return self._feed.microbatches(samples, plan)

    def _forward(
        self, fed: FedMicrobatch, entropy: EntropyMode, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies of the whole microbatch's trained tokens, [T']."""
        logprobs, entropies = self.parallel.module(fed.tensors, temperature, entropy)
        if entropies is not None:
            entropies = gather_trained(entropies, fed.context)
        return gather_trained(logprobs, fed.context), entropies

    def _step(
        self,
        samples: Sequence[TrainingSample],
        minibatch: Minibatch,
        plan: Sequence[Sequence[int]],
        count: int,
        algorithm: Algorithm,
        *,
        metrics: UpdateMetrics,
        iteration: int,
        compared: bool,
        before_step: BeforeStep | None,
        report: Callable[[int, int], None] | None,
    ) -> None:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        done = 0
        balance = None
        if algorithm.balance and (routers := self.parallel.module.routers) is not None:
            rows = [samples[row] for row in minibatch.rows]
            balance = RouterBalance.of(algorithm.balance, routers, rows, self.mesh)
        with self.parallel.passes():
            for number, fed in enumerate(self._microbatches(samples, plan, count), start=1):
                packed, own = fed.packed, number <= len(plan)
                if balance is not None:
                    fed = replace(fed, tensors=balance.charging(fed.tensors))
                self.parallel.begin_microbatch(last=number == count)
                tokens = packed.tokens.size
                with memory.microbatch(algorithm.stage, iteration, number, count, tokens):
                    if own and packed.targets.size:
                        self._accumulate(fed, minibatch, algorithm, metrics, compared)
                    elif self._others_wait or not own or balance is not None:
                        logprobs, _ = self._forward(fed, "none", self.temperature)
                        torch.autograd.backward(logprobs.sum() * 0.0)
                        if own and balance is not None:
                            metrics.routing.add(fed.tensors, self.parallel.module.routers)
                if own and report is not None:
                    done += len(packed.rows)
                    report(done, len(minibatch.rows))
        self._gradients.reduce()
        norm = self._gradients.clip(self.config.max_grad_norm)
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise UpdateRefused.of_norm(norm, minibatch.totals.n_tokens)
        mismatch = metrics.compare(self._ranks) if compared else {}
        if mismatch and before_step is not None:
            before_step(mismatch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        totals = minibatch.totals
        metrics.step(norm, time.perf_counter() - began, totals.n_tokens > totals.n_skipped)

    def _accumulate(
        self,
        fed: FedMicrobatch,
        minibatch: Minibatch,
        algorithm: Algorithm,
        metrics: UpdateMetrics,
        compared: bool,
    ) -> None:
        temperature = 1.0 if algorithm.supervised else self.temperature
        logprobs, entropy = self._forward(fed, algorithm.entropy_mode, temperature)
        evaluated = algorithm.evaluate(fed, logprobs, entropy, minibatch)
        torch.autograd.backward(evaluated.result.loss)
        metrics.microbatch(fed, evaluated, compared=compared)
        metrics.routing.add(fed.tensors, self.parallel.module.routers)

"""The policy learner: owns the model and its optimizer, scores samples and applies updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from earl_core.algorithms import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    EntropyBonus,
    ImportanceCorrection,
    LossInputs,
    Objective,
)
from earl_core.algorithms.policy_losses import PolicyGradient, PPOClip
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.learner import memory
from earl_core.learner.checkpoint import read_training_state, write_training_state
from earl_core.learner.feed import FedMicrobatch, Feed
from earl_core.learner.minibatches import Minibatch, split_minibatches
from earl_core.learner.model import (
    EntropyMode,
    PolicyModule,
    load_policy,
    load_tokenizer,
)
from earl_core.learner.optimizer import build_optimizer, learning_rate, set_learning_rate
from earl_core.learner.packing import TrainingSample, plan_shared
from earl_core.learner.update_metrics import UpdateMetrics

StepHook = Callable[[int], None]


class NonFiniteGradientError(ArithmeticError):
    """A minibatch gave gradients that are not finite; its step was not applied."""


class PolicyLearner:
    """Trains one causal language model on one device.

    model: what to load; directory: read weights and tokenizer from here instead of `model.path`.
    temperature: that of the rollout; logits are divided by it. iterations, seed: of the run.
    Raises ConfigError for a model that cannot be trained, AlgorithmConfigError for an unknown
    algorithm.
    """

    def __init__(
        self,
        model: ModelConfig,
        update: UpdateConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        iterations: int = 1,
        seed: int = 0,
        directory: Path | None = None,
    ) -> None:
        if update.threads:
            torch.set_num_threads(update.threads)
        self.config = update
        self.temperature = temperature
        self.iterations = iterations
        self.seed = seed
        self._objective = _objective(algorithm)
        correction = algorithm.importance_correction
        self._correction = (
            None if correction is None else ImportanceCorrection(**correction.model_dump())
        )
        # Anything but the two losses known to look at tokens one by one may need the episode
        # whole, a loss named by import path included.
        self._whole_episodes = not isinstance(
            self._objective.policy_loss, PolicyGradient | PPOClip
        ) or (self._correction is not None and self._correction.level == "sequence")
        self._accelerator = _accelerator(update.precision)
        self.model = load_policy(
            model, directory=directory, activation_checkpointing=update.activation_checkpointing
        )
        self.tokenizer = load_tokenizer(model, directory)
        optimizer = build_optimizer(self.model, update)
        self._module, self._optimizer = self._accelerator.prepare(
            PolicyModule(self.model), optimizer
        )
        self._feed = Feed(self.device)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return torch.device(self._accelerator.device)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The AdamW below accelerate's wrapper."""
        inner: torch.optim.Optimizer = self._optimizer.optimizer
        return inner

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The policy's float32 weights by state-dict name, tied ones once; not copied."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[TrainingSample],
        on_progress: Callable[[int, int], None] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Log-probs of the trained tokens under the weights as they are.

        Returns one float32 [L] per sample, 0 where the mask is 0: the columns `old_logprobs` (of
        the policy) and `reference_logprobs` (of a frozen one). They are written into `out` if it
        is given, whatever it held. on_progress(done, all) is called after each microbatch,
        counting samples.
        """
        if out is None:
            out = [np.empty(len(sample.tokens), dtype=np.float32) for sample in samples]
        scored = list(out)
        for logprobs_of_row in scored:
            logprobs_of_row[:] = 0.0
        done = 0
        for fed in self._microbatches(samples, range(len(samples))):
            packed = fed.packed
            if packed.targets.size:
                logprobs, _ = self._forward(fed, "none")
                per_row = packed.split_by_row(logprobs.cpu().numpy())
                for row, values in zip(packed.rows, per_row, strict=True):
                    scored[row][samples[row].loss_mask.astype(bool, copy=False)] = values
            done += len(packed.rows)
            if on_progress is not None:
                on_progress(done, len(samples))
        return scored

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        iteration: int,
        on_step: StepHook | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, float]:
        """Apply one iteration's optimizer steps; returns metrics.

        Each epoch visits all samples in `minibatches` parts of whole groups; each part is one
        optimizer step whose gradient does not depend on how it is cut into microbatches.
        iteration counts from 0. on_step(index) is called after each step, on_progress(trained
        samples, all samples) after each microbatch.

        Raises ValueError when a column that the algorithm needs is missing, and
        NonFiniteGradientError before a step that would destroy the weights.
        """
        config = self.config
        self._check_columns(samples)
        memory.reset_peak()
        rate = learning_rate(config, iteration, self.iterations)
        set_learning_rate(self.optimizer, rate)
        metrics = UpdateMetrics(rate)
        steps = 0
        for epoch in range(config.epochs):
            for minibatch in split_minibatches(
                samples, config.minibatches, seed=self.seed, iteration=iteration, epoch=epoch
            ):
                self._step(samples, minibatch, metrics, first_pass=epoch == 0, report=on_progress)
                if on_step is not None:
                    on_step(steps)
                steps += 1
        return metrics.summary() | memory.peak_bytes()

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write a training state that `restore` takes; see `checkpoint.write_training_state`."""
        write_training_state(
            directory,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            state=state,
        )

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a training state, bit for bit; returns the `state` given to `save`."""
        return read_training_state(directory, model=self.model, optimizer=self.optimizer)

    def _microbatches(
        self, samples: Sequence[TrainingSample], rows: Sequence[int]
    ) -> Iterator[FedMicrobatch]:
        plan = plan_shared(
            [samples[row].tokens for row in rows],
            self.config.max_tokens_per_microbatch,
            keep_together=(
                [samples[row].episode_id for row in rows] if self._whole_episodes else None
            ),
        )
        return self._feed.microbatches(samples, [[rows[index] for index in part] for part in plan])

    def _forward(
        self, fed: FedMicrobatch, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs, entropies = self._module(fed.tensors, self.temperature, entropy)
        return logprobs, entropies

    def _step(
        self,
        samples: Sequence[TrainingSample],
        minibatch: Minibatch,
        metrics: UpdateMetrics,
        *,
        first_pass: bool,
        report: Callable[[int, int], None] | None,
    ) -> None:
        began = time.perf_counter()
        self._optimizer.zero_grad()
        done = 0
        for fed in self._microbatches(samples, minibatch.rows):
            if fed.packed.targets.size:
                self._accumulate(fed, minibatch, metrics, first_pass=first_pass)
            done += len(fed.packed.rows)
            if report is not None:
                report(done, len(minibatch.rows))
        norm = self._accelerator.clip_grad_norm_(
            self._module.parameters(), self.config.max_grad_norm
        )
        if not torch.isfinite(norm):
            self._optimizer.zero_grad()
            raise NonFiniteGradientError(
                f"The gradient of a minibatch with {minibatch.totals.n_tokens} trained tokens is "
                f"{float(norm)}: its step was not applied. Lower update.learning_rate, or use "
                "update.precision fp32."
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        metrics.step(float(norm), time.perf_counter() - began)

    def _accumulate(
        self,
        fed: FedMicrobatch,
        minibatch: Minibatch,
        metrics: UpdateMetrics,
        *,
        first_pass: bool,
    ) -> None:
        active = self._objective.entropy_bonus.active
        mode: EntropyMode = "differentiable" if active else "detached"
        logprobs, entropy = self._forward(fed, mode)
        columns, index = fed.columns, fed.episode_index
        # Without old log-probs there is a single step, so the policy before it is this one.
        old = columns.get("old_logprobs", logprobs.detach())
        episodes = fed.packed.episode_ids.tolist()
        weights = None
        if self._correction is not None:
            weights = self._correction.weights(
                old, columns["rollout_logprobs"], index, len(episodes)
            )
        result = self._objective.microbatch(
            LossInputs(logprobs, old, columns["advantages"], index, len(episodes), weights),
            self._tensor(np.array([minibatch.token_counts[e] for e in episodes])),
            minibatch.totals,
            reference_logprobs=columns.get("reference_logprobs"),
            entropy=entropy,
        )
        self._accelerator.backward(result.loss)
        metrics.microbatch(
            fed.packed,
            loss=result.loss.detach(),
            parts=result.metrics,
            log_ratio=logprobs.detach() - old,
            old_logprobs=old if first_pass else None,
            importance_weights=weights,
            boundaries=fed.tensors.boundaries,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _check_columns(self, samples: Sequence[TrainingSample]) -> None:
        needed = {"advantages": "run the advantage stage first"}
        if self._objective.kl is not None:
            needed["reference_logprobs"] = "run the reference stage first"
        if self.config.epochs * self.config.minibatches > 1 or self._correction is not None:
            needed["old_logprobs"] = "fill it with `score` before the update"
        for sample in samples:
            for name, advice in needed.items():
                if getattr(sample, name) is None:
                    raise ValueError(f"Sample {sample.sample_id} has no {name}: {advice}.")


def _objective(algorithm: AlgorithmConfig) -> Objective:
    in_loss = algorithm.kl.placement == "loss"
    return Objective(
        policy_loss=POLICY_LOSSES.build(algorithm.policy_loss),
        aggregation=AGGREGATIONS.build(algorithm.aggregation),
        kl=KL_ESTIMATORS.build(algorithm.kl.estimator) if in_loss else None,
        kl_coefficient=algorithm.kl.coefficient if in_loss else 0.0,
        entropy_bonus=EntropyBonus(coefficient=algorithm.entropy_coefficient),
    )


def _accelerator(precision: str) -> Accelerator:
    wanted = "bf16" if precision == "bf16" else "no"
    # accelerate keeps one precision per process; a learner of another precision starts it afresh.
    if AcceleratorState._shared_state.get("_mixed_precision", wanted) != wanted:
        AcceleratorState._reset_state(reset_partial_state=False)
    return Accelerator(mixed_precision=wanted, cpu=not torch.cuda.is_available())

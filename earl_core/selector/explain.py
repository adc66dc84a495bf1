"""A choice for people: what was on offer, what each candidate would take, and why one was taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from earl_core.config.rollout import RolloutConfig, VllmConfig
from earl_core.config.update import UpdateConfig
from earl_core.selector.candidates import Candidate
from earl_core.selector.deployment import DeploymentPlan
from earl_core.selector.memory_model import (
    TrainingNeeds,
    engine_memory,
    kv_capacity_tokens,
    standard_activation_bytes,
    training_memory,
)
from earl_core.selector.policy import Choice, choose, select
from earl_core.selector.predict import Prediction, gib
from earl_core.selector.selection import SelectionInput
from earl_core.selector.settings import SelectorConfig
from earl_core.selector.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.statistics import Statistics

Row = dict[str, str]


class Question(NamedTuple):
    """A load nobody has run yet.

    context: tokens of an episode. responses: episodes of one iteration, over all engines together.
    running: most sequences of one engine. generated: share of the context that the model writes.
    """

    context: int
    responses: int
    running: int = 256
    generated: float = 0.5
    reference: bool = False
    engine_share: float = 0.85


def ask(shape: ModelShape, hardware: Hardware, question: Question) -> SelectionInput:
    """The input that `live_tokens` would see, had the last iteration shown just this load."""
    context, positions = question.context, shape.max_positions
    vllm = VllmConfig(gpu_memory_utilization=question.engine_share)
    return SelectionInput(
        iteration=0,
        rollout=RolloutConfig(
            prompts_per_iteration=question.responses,
            group_size=1,
            max_turns=1,
            max_model_len=max(8, min(positions, 2 * context)),
            max_running_requests=question.running,
            vllm=vllm,
        ),
        update=UpdateConfig(),
        needs_reference=question.reference,
        hardware=hardware,
        model=shape,
        statistics=Statistics(
            context_mean=(float(context),),
            context_max=(float(context),),
            turns_mean=(1.0,),
            generated_share=(question.generated,),
        ),
        selector=SelectorConfig(policy="live_tokens"),
    )


def considered(given: SelectionInput) -> Choice | None:
    """What `live_tokens` weighed for this input; None under a policy that weighs nothing."""
    return choose(given) if given.selector.policy == "live_tokens" else None


def candidate_rows(choice: Choice, stage: str, limit: int = 12) -> list[Row]:
    """The stage's candidates as a table: chosen one first, the best others, some ruled out."""
    rows = choice.predictions[stage]
    taken = _taken(choice.plan, rows)
    usable = [r for r in rows if not r.problem and r is not taken]
    refused = [r for r in rows if r.problem]
    shown = ([taken] if taken else []) + usable[: limit - 1]
    left = max(0, limit - len(shown))
    # One refused candidate of each reason says what all of them would.
    by_reason: dict[str, Prediction] = {}
    for row in refused:
        by_reason.setdefault(row.problem, row)
    shown += list(by_reason.values())[: max(left, 3)]
    base = taken.seconds if taken else rows[0].seconds
    return [_row(row, base, row is taken) for row in shown]


def _row(row: Prediction, base: float, taken: bool) -> Row:
    if row.problem or not math.isfinite(row.seconds):
        verdict = f"ruled out: {row.problem}"
        seconds = against = ""
    else:
        verdict = "chosen" if taken else ""
        seconds = f"{row.seconds:,.1f}"
        against = "" if taken else f"{100 * (row.seconds / base - 1):+.1f} %"
    return {
        "layout": row.candidate.label,
        "seconds": seconds,
        "against the chosen": against,
        "memory of a device": f"{gib(row.peak)} of {gib(row.budget)}",
        "KV cache filled": f"{100 * row.filled:,.0f} %" if 0 < row.filled < 1e6 else "",
        "known from": "roofline" if row.guess else "measurements",
        "verdict": verdict,
    }


def _taken(plan: DeploymentPlan, rows: list[Prediction]) -> Prediction | None:
    wanted = Candidate.of(plan[rows[0].candidate.stage])
    for row in rows:
        if row.candidate._replace(threads=wanted.threads) == wanted:
            return row
    return None


def refused_rows(choice: Choice) -> list[Row]:
    """Families of layouts that were not offered at all, each with its sentence."""
    rows = [{"stage": o.stage, "layout": o.label, "reason": o.reason} for o in choice.ruled_out]
    return list({tuple(row.items()): row for row in rows}.values())


def summary(given: SelectionInput) -> Row:
    """One line: the context, the layouts chosen for it, and their seconds."""
    choice = choose(given)
    taken = {stage: _taken(choice.plan, rows) for stage, rows in choice.predictions.items()}
    line = {"context": f"{round(given.statistics.context_mean[-1]):,}"}
    for stage, row in taken.items():
        if row is not None:
            line[stage] = row.candidate.label
            line[f"{stage}, seconds"] = f"{row.seconds:,.1f}"
    rollout = taken["rollout"]
    if rollout is not None:
        line["KV cache filled"] = f"{100 * rollout.filled:,.0f} %"
    return line


class Replay(NamedTuple):
    """A past choice, made again. agrees: whether the same plan came out."""

    given: SelectionInput
    sealed: DeploymentPlan
    again: DeploymentPlan

    @property
    def agrees(self) -> bool:
        """Whether layouts and policy are those that the run used."""
        return (self.sealed.stages, self.sealed.policy) == (self.again.stages, self.again.policy)


def replay(given: SelectionInput, sealed: DeploymentPlan) -> Replay:
    """Choose again from a sealed input."""
    return Replay(given, sealed, select(given))


def memory_rows(models: Mapping[str, ModelShape], device: DeviceFigures) -> list[Row]:
    """What the formulas give for well-known shapes, for people to check: one sample of 8K tokens
    and its update without checkpointing on one device, and an engine at the fewest devices that
    hold the model. Sizes in GiB."""
    return [_memory_row(name, shape, device) for name, shape in models.items()]


_SAMPLE = 8192
_ENGINE_SHARE = 0.85


def _memory_row(name: str, shape: ModelShape, device: DeviceFigures) -> Row:
    layout = Candidate("update", microbatch=_SAMPLE)
    update = training_memory(shape, layout, _SAMPLE, TrainingNeeds())
    lean = training_memory(
        shape, layout._replace(checkpointing=True, logits_chunk=1024), _SAMPLE, TrainingNeeds()
    )
    capacities = []
    for degree in (1, 2, 4, 8):
        engine = engine_memory(shape, device, Candidate("rollout", 1, degree), _ENGINE_SHARE)
        capacities.append(f"{kv_capacity_tokens(shape, engine, degree) / 1024:,.0f}")
    return {
        "model": name,
        "parameters": f"{shape.parameters / 1e9:.3g} B",
        "KV a token": f"{shape.kv_bytes_per_token() / 1024:g} KiB",
        "weights": _gib(update.weights),
        "gradients": _gib(update.gradients),
        "Adam": _gib(update.optimizer),
        "activations": _gib(update.activations),
        "checkpointed": _gib(lean.activations),
        "scores stored": _gib(standard_activation_bytes(shape, _SAMPLE)),
        "logits": _gib(update.logits),
        "KV cache, K tokens, TP 1/2/4/8": " / ".join(capacities),
    }


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}" if size < 10 * 2**30 else f"{size / 2**30:,.1f}"

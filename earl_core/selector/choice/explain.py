"""A choice for people: what was on offer, what each candidate would take, and why one was taken."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from earl_core.config.rollout import RolloutConfig, VllmConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import SELECTABLE
from earl_core.selector.choice.combination import evaluate
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import Prediction
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.activations import standard_activation_bytes
from earl_core.selector.model.candidates import RuledOut
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.memory_model import (
    MemoryModel,
    gib,
    kv_bytes_per_token,
)
from earl_core.selector.profile.observations import Observation
from earl_core.system.shared_memory import VERSIONS

Row = dict[str, str]


class PlannedLoad(NamedTuple):
    """A load nobody has run yet.

    context: tokens of an episode. responses: episodes of one iteration, over all engines together.
    running: most sequences of one engine, which may use `engine_share` of a device. staleness: how
    many versions older a rollout's may be.
    """

    context: int
    responses: int
    running: int = 256
    reference: bool = False
    engine_share: float = 0.85
    staleness: int = 0


def ask(shape: ModelShape, hardware: Hardware, load: PlannedLoad) -> SelectionInput:
    """The input that `live_tokens` would see, had the last iteration shown just this load."""
    seen = (float(load.context),)
    fast = device_of(hardware).bf16_factor <= 1
    return SelectionInput(
        rollout=RolloutConfig(
            prompts_per_iteration=load.responses,
            group_size=1,
            max_turns=1,
            max_model_len=max(8, min(shape.max_positions, 2 * load.context)),
            max_running_requests=load.running,
            dtype="bfloat16" if fast else "float32",
            vllm=VllmConfig(gpu_memory_utilization=load.engine_share),
        ),
        update=UpdateConfig(precision="bf16" if fast else "fp32"),
        needs_reference=load.reference,
        hardware=hardware,
        model=shape,
        statistics=Statistics(context_mean=seen, context_max=seen),
        selector=SelectorConfig(policy="live_tokens"),
        staleness=load.staleness,
        weight_versions=VERSIONS + load.staleness,
    )


class Considered(NamedTuple):
    """The candidates of a choice, whichever policy made it.

    predictions: of every stage, best first, ruled-out ones last, the one taken among them.
    ruled_out: candidates that were not offered. taken: by stage, the prediction of the one taken.
    """

    plan: DeploymentPlan
    predictions: dict[str, list[Prediction]]
    ruled_out: list[RuledOut]
    taken: dict[str, Prediction]


def considered(given: SelectionInput, plan: DeploymentPlan | None = None) -> Considered:
    """Every candidate under this input. plan: the one taken; by default what the policy takes.

    Pure, like the choice itself. Raises `NoFeasiblePlan` when there is no plan to take.
    """
    plan = plan or select(given)
    predictor = Predictor(given, division=plan.division)
    found, out = evaluate(predictor)
    taken = {}
    for stage, rows in found.items():
        wanted = predictor.candidate_of(plan[stage])
        same = [row for row in rows if row.candidate == wanted]
        if not same:
            # What the configuration names need not be on offer.
            same = [predictor.predict(wanted, predictor.now)]
            rows += same
        taken[stage] = same[0]
    return Considered(plan, found, out, taken)


def plan_rows(plan: DeploymentPlan) -> list[Row]:
    """The plan as a table: each stage deployment, what is predicted of it, and why it was taken."""
    rows = []
    for stage, deployment in plan.stages.items():
        row = {"stage": stage, "stage deployment": deployment_text(deployment)}
        seen = plan.predictions.get(stage)
        if seen is not None:
            row |= {
                "seconds": _seconds(seen.seconds),
                "tokens/s": f"{seen.tokens_per_second:,.0f}",
                "memory": f"{gib(seen.peak_bytes)} of {gib(seen.budget_bytes)}",
                "known from": _source(seen.measured),
            }
        rows.append({**row, "why": plan.reasons.get(stage, "")})
    if plan.division is not None:
        text = plan.division.placement
        if engines := plan.division.engine_devices:
            text += f", {engines} of a host's devices for the rollout"
        why = plan.reasons.get("placement", "")
        rows.append({"stage": "placement", "stage deployment": text, "why": why})
    if why := plan.reasons.get("policy", ""):
        rows.append({"stage": "policy", "stage deployment": plan.policy, "why": why})
    return rows


def deployment_text(deployment: StageDeployment) -> str:
    """A stage deployment in a few words, the engines' context length included."""
    if deployment.stage not in SELECTABLE:
        count = deployment.world_size
        return f"{count} process{'es' if count > 1 else ''}"
    length = deployment.max_model_len
    return deployment.label + (f", context {length}" if length else "")


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 9.995 else f"{value:.3g}"


def _source(measured: float) -> str:
    return "measurements" if measured >= 0.5 else "roofline (a guess)"


_MOST_CANDIDATES = 12


def candidate_rows(choice: Considered, stage: str) -> list[Row]:
    """The stage's candidates as a table: the one taken first, then the best others, then ruled-out
    ones; at most `_MOST_CANDIDATES`, of which a quarter is kept for the ruled out."""
    taken = choice.taken[stage]
    others = [row for row in choice.predictions[stage] if row is not taken]
    alike = _alike([row for row in others if not row.problem])
    usable = [rows[0] for rows in alike]
    refused = _varied([row for row in others if row.problem])
    kept = min(len(refused), max(_MOST_CANDIDATES // 4, _MOST_CANDIDATES - 1 - len(usable)))
    shown = [taken, *usable[: _MOST_CANDIDATES - 1 - kept], *refused[:kept]]
    table = [_row(row, taken.seconds, row is taken) for row in shown]
    for line, rows in zip(table[1:], alike[: _MOST_CANDIDATES - 1 - kept], strict=False):
        if len(rows) > 1:
            line["verdict"] = f"{len(rows) - 1} more come to much the same"
    return table


def _alike(usable: Sequence[Prediction]) -> list[list[Prediction]]:
    """Candidates for which much the same is predicted, together, such as token budgets that this
    load does not tell apart; best first."""
    groups: dict[tuple[str, ...], list[Prediction]] = {}
    for row in usable:
        place = f"{row.seconds:.3g}", f"{row.peak:.2g}", f"{row.filled:.2g}"
        groups.setdefault(place, []).append(row)
    return list(groups.values())


def _varied(refused: Sequence[Prediction]) -> list[Prediction]:
    """Infeasible candidates so that the first few show all kinds of reasons; reasons are of a kind
    when they differ in numbers only. Candidates that were seen to fail come first."""
    kinds: Counter[str] = Counter()
    ranked = []
    for place, row in enumerate(refused):
        kind = re.sub(r"\d[\d,.]*", "", row.problem)
        seen = "ran out of memory" in row.problem
        ranked.append((kinds[kind], not seen, place, row))
        kinds[kind] += 1
    return [row for *_, row in sorted(ranked, key=lambda item: item[:3])]


def _row(row: Prediction, base: float, taken: bool) -> Row:
    fails = row.problem or not math.isfinite(row.seconds)
    verdict = "chosen" if taken else ""
    if fails:
        verdict = f"chosen, though {row.problem}" if taken else f"ruled out: {row.problem}"
    compared = not (fails or taken) and 0 < base < math.inf
    return {
        "candidate": row.candidate.label,
        "seconds": "" if fails else _seconds(row.seconds),
        "against the chosen": f"{100 * (row.seconds / base - 1):+.1f} %" if compared else "",
        "memory": f"{gib(row.peak)} of {gib(row.budget)}",
        "KV cache filled": _filled(row),
        "known from": "roofline" if row.guess else "measurements",
        "verdict": verdict,
    }


def _filled(row: Prediction) -> str:
    return f"{100 * row.filled:,.0f} %" if 0 < row.filled < 1e6 else ""


def refused_rows(choice: Considered) -> list[Row]:
    """Families of candidates that were not offered at all, each with its sentence."""
    rows = [{"stage": o.stage, "candidates": o.label, "reason": o.reason} for o in choice.ruled_out]
    return list({tuple(row.items()): row for row in rows}.values())


def summary(given: SelectionInput) -> Row:
    """One line: the context, the candidates chosen for it, and their seconds."""
    taken = considered(given).taken
    line = {"context": f"{round(given.statistics.context_mean[-1]):,}"}
    for stage, row in taken.items():
        line[stage] = row.candidate.label
        line[f"{stage}, seconds"] = _seconds(row.seconds)
    line["KV cache filled"] = _filled(taken["rollout"])
    return line


def outcome_rows(
    given: SelectionInput, plan: DeploymentPlan, seen: Sequence[Observation]
) -> list[Row]:
    """List the predictions of each stage beside its measurements."""
    rows = []
    for item in seen:
        predicted = plan.predictions.get(item.stage)
        if item.kind != "measured" or plan.stages.get(item.stage) != item.deployment:
            continue
        row = {"stage": item.stage}
        if predicted is not None:
            row |= {
                "predicted seconds": _seconds(predicted.seconds),
                "measured seconds": _seconds(item.seconds),
                "predicted peak": gib(predicted.peak_bytes),
                "measured peak": gib(comparable_peak(item, given.hardware.gpus)),
            }
        sizes = f"{item.requests:,.0f} x {item.context:,.0f} tokens"
        rows.append({**row, "load": f"{sizes}, longest {item.longest:,.0f}"})
    return rows


def comparable_peak(seen: Observation, gpus: int) -> float:
    """A measured peak as predictions count it: of one device, without GPUs of all ranks of the
    stage together, which share the host's memory."""
    return seen.peak_bytes * (1 if gpus else seen.deployment.ranks)


def memory_rows(models: Mapping[str, ModelShape], device: DeviceFigures) -> list[Row]:
    """Apply the formulas to well-known shapes, for people to check: one sample of 8K tokens and its
    update without checkpointing on one device, and an engine at the fewest devices that hold the
    model. Sizes in GiB."""
    return [_memory_row(name, shape, device) for name, shape in models.items()]


_SAMPLE = 8192


def _memory_row(name: str, shape: ModelShape, device: DeviceFigures) -> Row:
    hardware = Hardware(cpu_cores=1, memory_bytes=1, gpus=1)
    memory, needs = MemoryModel(shape, device, hardware), TrainingNeeds(compiled=True)
    sample = StageDeployment("update", max_tokens_per_microbatch=_SAMPLE)
    update = memory.training(sample, _SAMPLE, needs)
    lean = memory.training(sample._replace(activation_checkpointing="full"), _SAMPLE, needs)
    capacities = []
    for degree in (1, 2, 4, 8):
        engine = memory.vllm(StageDeployment("rollout", 1, degree), VllmConfig())
        tokens = engine.kv_cache / kv_bytes_per_token(shape, degree)
        capacities.append(f"{tokens / 1024:,.0f}")
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


def figures_text(device: DeviceFigures) -> str:
    """Arithmetic, memory and links of a device, as far as the roofline uses them."""
    if device.float32_flops:
        rates = (device.flops, device.float32_flops, device.memory_bandwidth)
        text = "{:,.3g} GFLOPS bf16, {:,.3g} float32, {:.3g} GB/s memory"
        text = text.format(*(rate / 1e9 for rate in rates))
    else:
        text = f"{device.flops / 1e12:,.1f} TFLOPS bf16, {device.memory_bandwidth / 1e12:.2f} TB/s"
        text += " memory"
    text += f", {device.link_bandwidth / 1e9:.0f} GB/s links"
    if device.nvlink_gpus < 2:
        return text
    others = f"{device.peer_bandwidth / 1e9:.0f} GB/s to others of the host"
    return f"{text} of {device.nvlink_gpus} GPUs, {others}"

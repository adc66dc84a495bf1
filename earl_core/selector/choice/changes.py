"""Changes from one plan to the next, and the reasons of stage deployments, in lines for people."""

from __future__ import annotations

import math
from typing import NamedTuple

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import Prediction
from earl_core.selector.choice.selection import CONTEXT_RAISED
from earl_core.selector.model.memory_model import MemoryModel, gib
from earl_core.selector.profile.observations import Observation

_NUMBERS = {
    "replicas": "replicas",
    "context_parallel": "CP",
    "shard": "shard",
    "expert_parallel": "EP",
    "threads": "threads",
    "max_tokens_per_microbatch": "microbatch",
    "max_running_requests": "running",
    "max_model_len": "context",
}
_CHECKPOINTING = {
    "none": "no checkpointing",
    "selective": "selective checkpointing",
    "full": "checkpointing",
}


class StageSwitch(NamedTuple):
    """One stage whose deployment is not that of the plan before. reason: the new plan's."""

    stage: str
    before: StageDeployment
    after: StageDeployment
    reason: str

    @property
    def switched(self) -> bool:
        """True when more than the engines' context length differs."""
        return self.before._replace(max_model_len=0) != self.after._replace(max_model_len=0)

    @property
    def raised(self) -> bool:
        """True when the engines' context length grew."""
        return self.after.max_model_len > self.before.max_model_len

    @property
    def text(self) -> str:
        """The switch, such as `update: TP 1, microbatch 8192 -> 4096, checkpointing: <reason>`. The
        degree of tensor parallelism is always named, everything else only where it differs."""
        if self.switched:
            # The move that the reason may begin with is said already.
            move, colon, rest = self.reason.partition(": ")
            reason = rest if colon and "→" in move else self.reason
        else:
            # The clause about the context length alone.
            reason = self.reason.partition(CONTEXT_RAISED)[2].partition(": ")[2]
        return f"{self.stage}: {', '.join(self._words())}" + (f": {reason}" if reason else "")

    def _words(self) -> list[str]:
        old, new = self.before._asdict(), self.after._asdict()
        words = [_arrow("TP", old["tensor_parallel"], new["tensor_parallel"])]
        for field, word in _NUMBERS.items():
            if old[field] != new[field]:
                engines = field == "replicas" and self.stage == "rollout"
                words.append(_arrow("engines" if engines else word, old[field], new[field]))
        if old["activation_checkpointing"] != (rung := new["activation_checkpointing"]):
            words.append(_CHECKPOINTING[rung])
        if old["offload_optimizer"] != (moved := new["offload_optimizer"]):
            words.append("optimizer offloaded" if moved else "no optimizer offloaded")
        if old["logits_chunk_tokens"] != (chunk := new["logits_chunk_tokens"]):
            words.append(f"logits by {chunk}" if chunk else "all logits at once")
        return words


def stage_changes(before: DeploymentPlan | None, after: DeploymentPlan) -> list[StageSwitch]:
    """The stages of `after` that `before` deployed otherwise; none when there is no `before`."""
    if before is None:
        return []
    return [
        StageSwitch(stage, before.stages[stage], deployment, after.reasons.get(stage, ""))
        for stage, deployment in after.stages.items()
        if stage in before.stages and before.stages[stage] != deployment
    ]


def infeasible_text(seen: Observation) -> str:
    """Describe the failure of an infeasible stage, and the step that follows, in one line."""
    if seen.kind == "context_overflow":
        length = seen.deployment.max_model_len
        built = f" of {length:,} tokens" if length else ""
        what = (
            f"context overflow: an episode reached {seen.longest:,.0f} tokens, beyond the "
            f"engine's context{built}"
        )
    else:
        used = f" at {gib(seen.peak_bytes)} a device" if seen.peak_bytes else ""
        what = f"ran out of memory{used} under {seen.deployment.label}"
    if not seen.answered:
        return f"{seen.stage}: {what}"
    return f"{seen.stage}: {what}; the stage is repeated from its sealed inputs"


def _arrow(word: str, old: int, new: int) -> str:
    return f"{word} {new}" if old == new else f"{word} {old or 'any'} -> {new or 'any'}"


def reason_of(
    predictor: Predictor, rows: list[Prediction], old: Prediction | None, row: Prediction
) -> str:
    """Give the reason for the stage's deployment, in one sentence with its figures. rows: of all
    its candidates, best first. old: of the running deployment."""
    guess = " (a guess: not measured)" if row.guess else ""
    if old is None or old.candidate == row.candidate:
        return _kept(predictor, rows, row, old is not None) + guess
    move = _move(old.candidate, row.candidate)
    if old.problem:
        return f"{move}: {old.problem}{guess}"
    gained = old.seconds - row.seconds
    cost = switch_seconds(predictor, old.candidate, row.candidate)
    text = f"{move}: {_situation(predictor, old)}; predicted {_percent(old, row)}"
    text += f" and {cost:.1f} s to switch"
    if gained > 0:
        count = math.ceil(cost / gained) or 1
        text += f", repaid after {count} iteration{'s' if count > 1 else ''}"
    return text + guess


def _kept(predictor: Predictor, rows: list[Prediction], row: Prediction, running: bool) -> str:
    text = f"{row.candidate.label} {'kept' if running else 'chosen'}: {_situation(predictor, row)}"
    if row.candidate.stage == "update" and not running:
        text += _adapter(predictor)
    other = next((r for r in rows if r.allowed and r.candidate != row.candidate), None)
    if other is None:
        return text
    if other.seconds < row.seconds:
        text += f"; {other.candidate.label} would gain {_percent(row, other)}"
        return text + ", too little for a switch or for the stages together"
    slower = 100 * (other.seconds / row.seconds - 1)
    return text + f"; the next best, {other.candidate.label}, would take {slower:.1f} % more"


def _percent(old: Prediction, new: Prediction) -> str:
    return f"{100 * (old.seconds / new.seconds - 1):+.1f} %" if new.seconds > 0 else "nothing"


def _situation(predictor: Predictor, row: Prediction) -> str:
    candidate, load = row.candidate, predictor.now
    used = f"{100 * row.peak / row.budget:.0f} % of memory"
    if candidate.stage != "rollout":
        return f"the longest sample, {tokens(load.longest)} tokens, fills {used}"
    sequences = f"{load.offered(candidate):.0f} sequences x {tokens(load.context)} tokens"
    if not row.filled:
        return f"{sequences} fill {used}"
    place = f"the KV cache at TP {candidate.tensor_parallel}"
    if row.filled > 9.99:
        return f"{sequences} are far too many for {place}"
    return f"{sequences} fill {100 * row.filled:.0f} % of {place}"


def _adapter(predictor: Predictor) -> str:
    """Say what an adapter saves; empty without one."""
    shape, mixed = predictor.shape, predictor.given.update.mixed
    if shape.adapter is None:
        return ""
    alone = StageDeployment("update")
    whole, own = (
        MemoryModel(each, predictor.memory.device, predictor.hardware).state(alone, mixed).total
        for each in (shape.with_adapter(None), shape)
    )
    trained = f"{shape.trained_parameters / 1e6:,.1f} M of {shape.parameters / 1e9:.3g} B"
    return (
        f"; an adapter of rank {shape.adapter.rank} trains {trained} parameters, so that the "
        f"state of all ranks takes {gib(own)} instead of {gib(whole)}"
    )


_SHORT = {
    "tensor_parallel": "TP",
    "context_parallel": "CP",
    "expert_parallel": "EP",
    "max_tokens_per_microbatch": "microbatch",
    "max_running_requests": "running",
}


def _move(old: StageDeployment, new: StageDeployment) -> str:
    """The field that differs, such as `TP 4 → 8`; both whole when several do."""
    pairs = zip(StageDeployment._fields, old, new, strict=True)
    changed = [
        (name, a, b) for name, a, b in pairs if a != b and name not in ("replicas", "threads")
    ]
    if len(changed) == 1 and changed[0][0] in _SHORT:
        name, before, after = changed[0]
        return f"{_SHORT[name]} {before} → {after}"
    return f"{old.label} → {new.label}"


def tokens(count: float) -> str:
    """Write a number of tokens, such as `812` or `31K`, in units of 1,024."""
    return f"{count:.0f}" if count < 1024 else f"{count / 1024:.0f}K"


def switch_seconds(predictor: Predictor, before: StageDeployment, after: StageDeployment) -> float:
    """Seconds of the move, as last measured; else a rebuild costs what is configured, and a
    reshard the time in which the state goes over the links once."""
    move, known = move_between(before, after), predictor.given.statistics
    if move == "rebuild":
        return known.switch_seconds.get(after.stage, predictor.given.selector.switch_seconds)
    if move != "reshard":
        return 0.0
    whole = predictor.memory.state(StageDeployment("update"), predictor.given.update.mixed)
    moved = whole.total / after.ranks
    guess = moved / predictor.roofline.group_bandwidth(after.ranks)
    return known.reshard_seconds.get(after.stage, guess)

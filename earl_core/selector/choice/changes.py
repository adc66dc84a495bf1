"""What changes from one plan to the next and why, in lines for people."""

from __future__ import annotations

from typing import NamedTuple

from earl_core.deployment.stage_deployment import DeploymentPlan, StageDeployment
from earl_core.selector.choice.predict import gib
from earl_core.selector.choice.selection import CONTEXT_RAISED
from earl_core.selector.model.candidates import Candidate
from earl_core.selector.profile.observations import Observation

_NUMBERS = {
    "context_parallel": "CP",
    "shard": "shard",
    "threads": "threads",
    "max_tokens_per_microbatch": "microbatch",
    "max_running_requests": "running",
    "max_model_len": "context",
}
_MEANS = {
    "activation_checkpointing": "checkpointing",
    "offload_optimizer": "optimizer offloaded",
}


class LayoutChange(NamedTuple):
    """One stage whose layout is not that of the plan before. reason: the new plan's."""

    stage: str
    before: StageDeployment
    after: StageDeployment
    reason: str

    @property
    def switched(self) -> bool:
        """Whether more than the engines' context length differs."""
        return _without_length(self.before) != _without_length(self.after)

    @property
    def raised(self) -> bool:
        """Whether the engines' context length grew."""
        return (self.after.max_model_len or 0) > (self.before.max_model_len or 0)

    @property
    def text(self) -> str:
        """Such as `update: TP 1, microbatch 8192 -> 4096, checkpointing: <reason>`.

        The degree of tensor parallelism is always named, everything else only where it differs.
        """
        layout = ", ".join(self._words())
        reason = _sentence(self.reason) if self.switched else _raise_reason(self.reason)
        return f"{self.stage}: {layout}" + (f": {reason}" if reason else "")

    def _words(self) -> list[str]:
        words = [_arrow("TP", self.before.tensor_parallel, self.after.tensor_parallel)]
        copies = "engines" if self.stage == "rollout" else "copies"
        for field, word in {"replicas": copies, **_NUMBERS}.items():
            old, new = getattr(self.before, field), getattr(self.after, field)
            if old != new:
                words.append(_arrow(word, old, new))
        for field, word in _MEANS.items():
            if getattr(self.before, field) != getattr(self.after, field):
                words.append(word if getattr(self.after, field) else f"no {word}")
        old, new = self.before.logits_chunk_tokens, self.after.logits_chunk_tokens
        if old != new:
            words.append(f"logits by {new}" if new else "all logits at once")
        return words


def layout_changes(before: DeploymentPlan | None, after: DeploymentPlan) -> list[LayoutChange]:
    """The stages of `after` that `before` laid out otherwise; none when there is no `before`."""
    if before is None:
        return []
    return [
        LayoutChange(stage, before.stages[stage], deployment, after.reasons.get(stage, ""))
        for stage, deployment in after.stages.items()
        if stage in before.stages and before.stages[stage] != deployment
    ]


def infeasible_text(seen: Observation) -> str:
    """Why a stage was infeasible, and what follows, in one line."""
    if seen.kind == "context_overflow":
        length = seen.deployment.max_model_len
        built = f" of {length:,} tokens" if length else ""
        what = (
            f"context overflow: an episode reached {seen.longest:,.0f} tokens, beyond the "
            f"engine's context{built}"
        )
    else:
        used = f" at {gib(seen.peak_bytes)} a device" if seen.peak_bytes else ""
        what = f"ran out of memory{used} under {Candidate.of(seen.deployment).label}"
    if not seen.answered:
        return f"{seen.stage}: {what}"
    return f"{seen.stage}: {what}; the stage is repeated from its sealed inputs"


def _without_length(deployment: StageDeployment) -> StageDeployment:
    return deployment.model_copy(update={"max_model_len": None})


def _arrow(word: str, old: int | None, new: int | None) -> str:
    shown = ["any" if value is None else str(value) for value in (old, new)]
    return f"{word} {shown[1]}" if old == new else f"{word} {shown[0]} -> {shown[1]}"


def _sentence(reason: str) -> str:
    """The reason without the move that it may begin with, which the line has said already."""
    move, colon, rest = reason.partition(": ")
    return rest if colon and "→" in move else reason


def _raise_reason(reason: str) -> str:
    """The clause about the context length alone."""
    clause = reason.partition(CONTEXT_RAISED)[2]
    return clause.partition(": ")[2]

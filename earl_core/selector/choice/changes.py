"""Changes from one plan to the next and their reasons, in lines for people."""

from __future__ import annotations

from typing import NamedTuple

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.selection import CONTEXT_RAISED
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.observations import Observation

_NUMBERS = {
    "replicas": "replicas",
    "context_parallel": "CP",
    "shard": "shard",
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
        """The switch in words, such as `update: TP 1, microbatch 8192 -> 4096, checkpointing:
        <reason>`.

        The degree of tensor parallelism is always named, everything else only where it differs.
        """
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

"""What the guard found in an iteration, and what it decided: sealed with its advantages.

A decision follows from sealed data and from the decisions of earlier iterations alone, so that a
resumed run decides the same.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from earl_core.dispatch import Manifest
from earl_core.secrets import redact

GUARD = "guard"
"""Among the outputs of the advantage stage's manifest: a dumped `Decision`."""


class Finding(BaseModel):
    """One thing that is not as it should be, with its evidence.

    kind: its name in the ledger and in metrics, such as `reward_range`. onset: the first iteration
    that shows it. text: one sentence with the numbers. episodes: ids of those that show it, at most
    some. prompts: (label of the environment, number of the prompt) of those named by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    onset: int
    text: str
    episodes: tuple[int, ...] = ()
    prompts: tuple[tuple[str, int], ...] = ()


NOT_JUDGED = "not_judged"
"""The kind of a finding about the guard itself: by a fault of its own it cannot tell."""


def not_judged(iteration: int, what: str, error: Exception) -> Finding:
    """The finding that the guard could not look at something. what: it, as part of a sentence."""
    text = redact(f"the guard could not look at {what}: {type(error).__name__}: {error}")
    return Finding(kind=NOT_JUDGED, onset=iteration, text=text)


class Decision(BaseModel):
    """Findings of an iteration, and what follows from them; nothing but findings under `warn`.

    quarantined: ids of episodes that leave their group as failed ones do. cautious: whether the
    iteration's update has the lower learning rate and the higher KL coefficient because of what is
    found. branch_caution: how many times more it has them because of what its branch began for.
    back_to: the iteration after whose checkpoint the run goes on in a new branch (-1: from the
    initial model); None: it goes on. stop: why the run ends; empty: it does not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...] = ()
    quarantined: tuple[int, ...] = ()
    cautious: bool = False
    branch_caution: int = 0
    back_to: int | None = None
    stop: str = Field(default="")

    @property
    def caution(self) -> int:
        """How many times the factors of a cautious update apply."""
        return self.branch_caution + self.cautious

    @property
    def left_out(self) -> tuple[tuple[str, int], ...]:
        """Prompts that a branch which is opened for this decision leaves out, ascending."""
        return tuple(sorted({each for found in self.findings for each in found.prompts}))


def decision_of(advantage: Manifest) -> Decision:
    """The decision that was sealed with these advantages; an empty one where nobody looked."""
    return Decision.model_validate(advantage.outputs.get(GUARD, {}))

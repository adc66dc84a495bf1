"""The branches of a run: each began when the run went back to an earlier checkpoint by itself.

Equal seeds give equal iterations, so going back alone would repeat what it went back from. From its
branch on, an iteration draws by a seed of its own and leaves out prompts that were named, and the
keys of its stages cover both. Iterations before it stay as they are, and so do evaluations, whose
prompts and seeds are the same in every branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from earl_core.deployment.stages import EVALUATION
from earl_core.trajectory.samples import derive_seed

BRANCHES = "branches"
"""In run.json: the dumped branches, the oldest first."""

Prompt = tuple[str, int]
"""The label of an environment, and the number of a prompt there."""


class Branch(BaseModel):
    """One branch.

    number: from 1. after: the iteration after whose checkpoint it goes on; -1: the initial model.
    from_iteration: the one in which the run went back. kinds, text: of the findings, and why.
    left_out: prompts that are not played in it, those of earlier branches included, ascending.
    set_aside: where what came after `after` lies, in
    the run directory; empty in a fork. pending: the run has yet to go back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    after: int
    from_iteration: int
    kinds: tuple[str, ...] = ()
    text: str = ""
    left_out: tuple[Prompt, ...] = ()
    set_aside: str = ""
    pending: bool = False

    @property
    def line(self) -> str:
        """The branch in a line for people."""
        begins = f"after iteration {self.after}" if self.after >= 0 else "from the initial model"
        lies = f" ({self.set_aside} holds what came after it)" if self.set_aside else ""
        return f"{begins}{lies}: {self.text}"


@dataclass(frozen=True)
class Branches:
    """All branches of a run, the oldest first."""

    opened: tuple[Branch, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Branches:
        """Those that a run's record names."""
        return cls.load(record.get(BRANCHES, ()))

    @classmethod
    def load(cls, dumped: Iterable[Mapping[str, Any]]) -> Branches:
        """What `dump` gave."""
        return cls(tuple(Branch.model_validate(each) for each in dumped))

    def dump(self) -> list[dict[str, Any]]:
        """As JSON holds them."""
        return [each.model_dump(mode="json") for each in self.opened]

    def at(self, iteration: int) -> Branch | None:
        """The branch that an iteration is of: the last one that began before it."""
        return next((each for each in reversed(self.opened) if each.after < iteration), None)

    def seed(self, seed: int, iteration: int) -> int:
        """The seed of an iteration's draws. seed: the run's."""
        branch = self.at(iteration)
        return seed if branch is None else derive_seed(seed, "branch", branch.number)

    def left_out(self, iteration: int) -> dict[str, frozenset[int]]:
        """The prompts that an iteration leaves out, by label."""
        branch = self.at(iteration)
        found: dict[str, set[int]] = {}
        for label, number in branch.left_out if branch is not None else ():
            found.setdefault(label, set()).add(number)
        return {label: frozenset(numbers) for label, numbers in found.items()}

    def key(self, iteration: int, stage: str) -> list[Any]:
        """What the key of a stage of an iteration covers besides all else; nothing before the first
        branch, and for evaluations."""
        branch = None if stage == EVALUATION.name else self.at(iteration)
        if branch is None:
            return []
        return [{"branch": branch.number, "left_out": branch.left_out}]

    def further(
        self,
        *,
        after: int,
        from_iteration: int,
        kinds: Iterable[str],
        text: str,
        left_out: Iterable[Prompt],
        set_aside: str,
    ) -> Branches:
        """These and one more, which is pending."""
        out = {*left_out, *(each for one in self.opened for each in one.left_out)}
        branch = Branch(
            number=1 + max((each.number for each in self.opened), default=0),
            after=after,
            from_iteration=from_iteration,
            kinds=tuple(dict.fromkeys(kinds)),
            text=text,
            left_out=tuple(sorted(out)),
            set_aside=set_aside,
            pending=True,
        )
        return Branches((*self.opened, branch))

    def through(self, iteration: int) -> Branches:
        """Those that are of the past of a run that goes on after the checkpoint of this iteration.
        Until a return is done, later checkpoints are of the branch before it."""
        return Branches(
            tuple(
                each
                for each in self.opened
                if each.after == iteration or (each.after < iteration and not each.pending)
            )
        )


def numbered(place: int, left_out: Iterable[int], count: int = 0) -> int:
    """The number of the prompt that has a place among those that are played.

    Places count all prompts in order. count: how many there are, which come again and again, so
    that a number stands for all that are equal to it modulo the count; 0: numbers have no end.
    Raises `ValueError` where none is left.
    """
    if not count:
        return _skipping(place, sorted(set(left_out)))
    rows = sorted({number % count for number in left_out})
    if len(rows) == count:
        raise ValueError(f"all {count} prompts are left out")
    epoch, place = divmod(place, count - len(rows))
    return epoch * count + _skipping(place, rows)


def _skipping(place: int, left_out: Sequence[int]) -> int:
    for number in left_out:
        if number > place:
            break
        place += 1
    return place

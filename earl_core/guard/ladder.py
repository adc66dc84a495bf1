"""What follows from findings, from least to most: episodes leave their groups, the run becomes
cautious, goes back, and stops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from earl_core.guard.decision import NOT_JUDGED, Decision, Finding

OF_EPISODES = ("reward_range", "reward_invalid")
"""Findings that name the episodes that show them."""

PROBED = ("probe_environment", "probe_reward")
"""Findings of the probe."""

OF_SOURCES = (*PROBED, "reward_constant")
"""Findings about who pays: no smaller step helps, and whatever was learnt since is wrong."""

AS_PLAYED = (
    "level_shift",
    "reward_constant",
    "context_growth",
    "entropy_collapse",
    "entropy_growth",
)
"""Findings in what a policy has played: the checkpoint that played the onset is no good one."""

CAUTION = 5
"""Iterations with the lower learning rate and the higher KL coefficient."""
AGAIN = 10
"""Iterations after a caution in which a finding about learning says that it has not helped."""
CONFIRMED = 3
"""Iterations before, in one of which a finding about a source was there already: one may be an
accident of the machine."""
OPEN = CAUTION + AGAIN
"""Iterations in which a finding of the same kind is the same one."""
MOST_RETURNS = 3


class Past(NamedTuple):
    """What was before. earlier: decisions of iterations that had ended, by iteration. lag: how many
    iterations before this one had not ended. checkpoints: iterations with a checkpoint, ascending.
    returns: how often the run went back. branch_caution: how many times this iteration has the
    factors of a cautious update because of what its branch began for."""

    earlier: Mapping[int, Decision]
    lag: int
    checkpoints: Sequence[int]
    returns: int
    branch_caution: int = 0


def decide(
    iteration: int, findings: Sequence[Finding], outside: Sequence[int], mostly: bool, past: Past
) -> Decision:
    """Decide what is done about an iteration's findings.

    outside: ids of episodes whose rewards are not to be believed, which leave their groups. mostly:
    they are too many for that, or half of what a source gave and more: it is the source that is
    wrong.
    """
    wrong = [each for each in findings if each.kind in OF_SOURCES]
    if mostly:
        wrong += [each for each in findings if each.kind in OF_EPISODES]
    learning = [each for each in findings if _of_learning(each.kind)]
    begun, last = _caution(past)
    cautious = begun is not None and iteration < begun + CAUTION
    causes = [each for each in wrong if _confirmed(each, iteration, past)]
    if learning and not cautious:
        if last is not None and iteration - last <= AGAIN:
            causes += learning
        else:
            cautious = True
    made = partial(Decision, quarantined=tuple(outside), branch_caution=past.branch_caution)
    if not causes:
        return made(findings=tuple(findings), cautious=cautious)
    told = tuple(_with_prompts(each, past) for each in findings)
    back_to = _before(min(_spoilt(each, iteration, past) for each in causes), past.checkpoints)
    if past.returns < MOST_RETURNS:
        return made(findings=told, back_to=back_to)
    why = f"the run went back {past.returns} times, and this is still there: "
    causing = "; ".join(f"{each.text} ({each.kind})" for each in causes)
    good = f"the checkpoint of iteration {back_to}" if back_to >= 0 else "the initial model"
    stop = f"{why}{causing}; {good} is from before it"
    return made(findings=told, stop=stop)


def _of_learning(kind: str) -> bool:
    """Whether smaller steps may help."""
    return kind not in (*OF_SOURCES, *OF_EPISODES, NOT_JUDGED)


def is_for_learning(kinds: Iterable[str]) -> bool:
    """Tell whether a run that went back for findings of these kinds did so because of what it had
    learnt: as quick as before it would learn the same again."""
    kinds = set(kinds)
    return any(map(_of_learning, kinds)) and not kinds & set(OF_SOURCES)


def _caution(past: Past) -> tuple[int | None, int | None]:
    """The iteration that the last caution began with, and its last one; None: there was none."""
    cautious = sorted(number for number, each in past.earlier.items() if each.cautious)
    if not cautious:
        return None, None
    begun = cautious[-1]
    for number in reversed(cautious):
        if begun - number > 1 + past.lag:
            break
        begun = number
    return begun, cautious[-1]


def _same(finding: Finding, past: Past) -> Iterable[tuple[int, Finding]]:
    """Findings of this kind in earlier iterations, with these."""
    for number, decision in past.earlier.items():
        for each in decision.findings:
            if each.kind == finding.kind:
                yield number, each


def _before(spoilt: int, checkpoints: Sequence[int]) -> int:
    """The last checkpoint from before an iteration; where there is none, the first one after it, or
    the initial model, whichever is nearer to it."""
    before = [each for each in checkpoints if each < spoilt]
    first = min(checkpoints, default=2 * spoilt + 1)
    return max(before) if before else first if first - spoilt < spoilt + 1 else -1


def recent(iteration: int, past: Past) -> dict[int, Decision]:
    """The decisions of the iterations whose findings are still there, if they are of the same kind:
    a source's accidents that are further apart are no single one."""
    first = iteration - past.lag - CONFIRMED
    return {number: each for number, each in past.earlier.items() if number >= first}


def _confirmed(finding: Finding, iteration: int, past: Past) -> bool:
    lately = past._replace(earlier=recent(iteration, past))
    return bool([*_same(finding, lately)])


def _spoilt(finding: Finding, iteration: int, past: Past) -> int:
    """The first iteration whose checkpoint may be what a finding is about."""
    if finding.kind in OF_SOURCES + OF_EPISODES:
        past = past._replace(earlier=recent(iteration, past))
    onset = min([finding.onset, *(each.onset for _, each in _same(finding, past))])
    return onset - _played_before(finding, past)


def _played_before(finding: Finding, past: Past) -> int:
    """Iterations between the checkpoint that played one and that of the iteration itself."""
    return 1 + past.lag if finding.kind in AS_PLAYED else 0


def _with_prompts(finding: Finding, past: Past) -> Finding:
    """The finding with the prompts that were named before: a branch leaves them all out."""
    before = {named for _, each in _same(finding, past) for named in each.prompts}
    prompts = before | set(finding.prompts)
    return finding.model_copy(update={"prompts": tuple(sorted(prompts))})


def last_good(decision: Decision, past: Past) -> int | None:
    """The checkpoint to keep for a return: the last one from before what is known now; None: no
    finding is open, or there is no such checkpoint."""
    everything = [*decision.findings, *(e for each in past.earlier.values() for e in each.findings)]
    spoilt = min((each.onset - _played_before(each, past) for each in everything), default=None)
    if spoilt is None:
        return None
    return max((each for each in past.checkpoints if each < spoilt), default=None)

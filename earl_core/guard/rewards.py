"""Findings in what sources of rewards gave in an iteration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from earl_core.guard.decision import Decision, Finding
from earl_core.guard.detectors import FEWEST, REMEMBERED, Numbers
from earl_core.guard.seen import HUGE, Bounds, Seen

WIDE = 1000.0
"""Beyond what a source has given by so many times its scale a reward is no reward: what somebody
means to be larger by far is declared."""


def seen_bounds(history: Sequence[Numbers], source: str) -> Bounds:
    """The bounds of a source that has declared none. history: numbers of the iterations before.

    Medians of what iterations gave, so that no single one widens them.
    """
    name = f"guard/of/{source}"
    lines = [line for line in history if f"{name}/low" in line][-REMEMBERED:]
    if len(lines) < FEWEST:
        return HUGE
    low = statistics.median(line[f"{name}/low"] for line in lines)
    high = statistics.median(line[f"{name}/high"] for line in lines)
    scale = max(high - low, abs(low), abs(high))
    return (low - WIDE * scale, high + WIDE * scale) if scale else HUGE


def reward_findings(
    iteration: int,
    seen: Mapping[str, Seen],
    invalid: int,
    bounds: Mapping[str, Bounds],
    declared: Mapping[str, Bounds],
) -> list[Finding]:
    """Findings about rewards outside of what their source can give, or that are no numbers.

    invalid: how many episodes failed in the rollout by rewards that are no numbers. bounds: of all
    sources; declared: those that were declared.
    """
    found = []
    for source, each in seen.items():
        if each.number_outside:
            low, high = bounds.get(source, HUGE)
            why = "it declares" if source in declared else "it has given so far, by far"
            text = (
                f"{each.number_outside} of {each.episodes.count + each.number_outside} rewards of "
                f"{source} lie outside of [{low:.4g}, {high:.4g}], which {why}: {each.worst:.4g}"
            )
            found.append(
                Finding(
                    kind="reward_range",
                    onset=iteration,
                    text=text,
                    episodes=tuple(each.outside[:_NAMED]),
                    # Where most lie outside it is the source, whatever it was asked for.
                    prompts=() if each.mostly_outside else tuple(each.prompts),
                )
            )
    without = {source: each.invalid for source, each in seen.items() if each.invalid}
    if invalid:
        without["environment"] = invalid
    for source, number in without.items():
        text = f"{number} rewards of {source} are no finite numbers up to 1e30"
        named = tuple(seen[source].named_invalid) if source in seen else ()
        kind = "reward_invalid"
        found.append(Finding(kind=kind, onset=iteration, text=text, episodes=named))
    return found


_NAMED = 32
"""Episodes that a finding names at most."""


def since(finding: Finding, earlier: Mapping[int, Decision]) -> Finding:
    """The finding with the onset of the same kind in earlier iterations that are remembered."""
    before = (e.onset for d in earlier.values() for e in d.findings if e.kind == finding.kind)
    return finding.model_copy(update={"onset": min([finding.onset, *before])})

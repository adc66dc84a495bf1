"""Prompts dealt to engines by the lengths of past episodes: seconds by `rollout.deal`.

    python -m benchmarks.history --markdown benchmarks/results/history.md

Simulated: prompts come again in every epoch, and each has a length of its own from which its
episodes deviate (log-normal, both). `EARL` deals by the lengths that the prompt's group had in
the epoch before; the deals are those of the product (`earl_core.control.dealing`). An engine's
sequences slow each other down (`benchmarks.schedules`), it has room for as many as there are, or
for a part. `limit` is the time of engines that all end at the same moment, or that of the longest
episode alone, whichever is greater. Where iterations overlap the learner takes as long as a rollout
of the limit. All deals are given the same lengths.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.schedules import Speed, pinned, play
from earl_core.control.dealing import DEALS, deal_by_length
from earl_core.run.past_lengths import PastLength
from tools.harness import Report, Row, parser, publish

_GROUP = 8
_SLOWDOWN = 0.01
_STEP = 0.012
"""Seconds of a token of a sequence that runs alone."""
_ITERATIONS = 4
"""Of an epoch."""
NAMES = ("contiguous", *DEALS)


@dataclass(frozen=True)
class Case:
    """What is dealt. text: standard deviation of the logarithm of a prompt's own length; chance: of
    its episodes'. prompts: for each engine. room: for which part of its sequences an engine has
    some. staleness: of iterations that overlap; 0: they do not."""

    engines: int
    prompts: int
    text: float
    chance: float
    room: float
    staleness: int


def cases(quick: bool) -> Iterator[Case]:
    """All that is simulated."""
    spreads = ((1.0, 0.3), (0.6, 0.6), (0.0, 1.0))
    engines = (2, 8) if quick else (2, 4, 16)
    prompts = (4, 16) if quick else (2, 8, 16)
    for (text, chance), room, staleness, of, each in itertools.product(
        spreads, (1.0, 0.25), (0, 1), engines, prompts
    ):
        yield Case(of, each, text, chance, room, staleness)


def lengths(case: Case, epochs: int, drawn: random.Random) -> list[list[list[float]]]:
    """Tokens of the episodes of each prompt, by epoch. They grow by a tenth an epoch."""
    count = case.engines * case.prompts * _ITERATIONS
    own = [drawn.gauss(math.log(1000), case.text) for _ in range(count)]
    return [
        [
            [drawn.lognormvariate(mean + 0.1 * epoch, case.chance) for _ in range(_GROUP)]
            for mean in own
        ]
        for epoch in range(epochs)
    ]


def simulate(case: Case, epochs: int, seed: int) -> dict[str, float]:
    """Seconds of the iterations of all epochs but the first, which has no history, by deal; and the
    limit's."""
    played = lengths(case, epochs, random.Random(seed))
    size = case.engines * case.prompts
    speed = Speed(_SLOWDOWN, max(1, round(case.room * case.prompts * _GROUP)))
    rollouts: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    limits: list[float] = []
    for epoch, start in itertools.product(range(1, epochs), range(0, len(played[0]), size)):
        numbers = range(start, start + size)
        now = [[_STEP * tokens for tokens in played[epoch][n]] for n in numbers]
        past = [PastLength.of(played[epoch - 1][n]) for n in numbers]
        for name in NAMES:
            parts = deal_by_length(name, past, len(limits), case.engines)(range(size), case.engines)
            rollouts[name].append(
                [play([each for n in part for each in now[n]], speed) for part in parts]
            )
        limits.append(_limit(now, case, speed))
    training = [0.0 if not case.staleness else limit for limit in limits]
    found = {
        name: pinned(each, training, case.staleness, side_by_side=case.staleness > 0)[-1]
        for name, each in rollouts.items()
    }
    even = [[limit] * case.engines for limit in limits]
    found["limit"] = pinned(even, training, case.staleness, side_by_side=case.staleness > 0)[-1]
    return found


def _limit(groups: Sequence[Sequence[float]], case: Case, speed: Speed) -> float:
    """Seconds of a rollout on engines that are all full until the end."""
    sequences = sorted(itertools.chain(*groups), reverse=True)
    running = min(speed.running, len(sequences) / case.engines)
    even = sum(sequences) / case.engines * (1 + speed.slowdown * running) / running
    return max(even, sequences[0] * (1 + speed.slowdown))


def gains(case: Case, epochs: int, seeds: int) -> dict[str, float]:
    """Seconds of the contiguous deal over those of each other, and of the limit; `seconds` of an
    iteration with the contiguous deal."""
    runs = [simulate(case, epochs, seed) for seed in range(seeds)]
    seconds = {name: sum(run[name] for run in runs) for name in runs[0]}
    whole = seconds.pop("contiguous")
    found = {name: whole / each for name, each in seconds.items()}
    return {**found, "seconds": whole / (seeds * (epochs - 1) * _ITERATIONS)}


def main() -> None:
    options = _options()
    report = Report("history", "Speed of iterations by how prompts are dealt to engines")
    epochs, seeds = (3, 3) if options.quick else (4, 20)
    found = {case: gains(case, epochs, seeds) for case in cases(options.quick)}
    kinds = dict.fromkeys((c.text, c.chance, c.room, c.staleness) for c in found)
    for kind in kinds:
        alike = [f for c, f in found.items() if (c.text, c.chance, c.room, c.staleness) == kind]
        text, chance, room, staleness = kind
        row: Row = {
            "spread of prompts": text,
            "of chance": chance,
            "room": room,
            "staleness": staleness,
            "contiguous (s)": _mean([each["seconds"] for each in alike]),
        }
        for name in DEALS:
            row[f"{name}, worst"] = min(each[name] for each in alike)
            row[name] = _mean([each[name] for each in alike])
        row["limit"] = _mean([each["limit"] for each in alike])
        report.rows.append(row)
    ours = [each["longest_first"] for each in found.values()]
    report.headline["history_worst"] = min(ours)
    report.headline["history_deal_best"] = max(ours)
    report.headline["history_deal_mean"] = _mean(ours)
    report.headline["histopipe_worst"] = min(each["histopipe"] for each in found.values())
    engines, prompts = ({getattr(c, name) for c in found} for name in ("engines", "prompts"))
    report.notes += [
        "A deal's columns are speeds over the contiguous deal: its worst case, and the geometric "
        f"mean, over {sorted(engines)} engines with {sorted(prompts)} prompts of {_GROUP} episodes "
        f"each. A case is {seeds * (epochs - 1) * _ITERATIONS} iterations.",
        "history_worst and history_deal_best are longest_first's in the worst and the best case. "
        "Where lengths are chance alone (spread of prompts 0) no deal can gain, and what is below "
        "1 is chance, too.",
    ]
    publish(report, options)


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _options() -> argparse.Namespace:
    return parser(__doc__ or "").parse_args()


if __name__ == "__main__":
    main()

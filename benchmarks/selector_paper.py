"""The selector against the grid that the EARL paper printed (arXiv 2510.05943).

`roofline_cells_right`: signs right with no measurement at all. `grid_cells_right`: signs right with
the grid as profile, each cell predicted without itself, its row or its column; the worst of the
three. Then the time lost by each policy against the best schedule in hindsight, as contexts grow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.selector_grid import (
    ENGINE_SHARE,
    HARDWARE,
    LARGE,
    MODEL,
    RESPONSES,
    SMALL,
    SWITCH_SHARE,
    Excluded,
    Place,
    cells,
    certain,
    layout,
    measured,
    regrets,
    selection,
)
from earl_core.selector.choice.explain import considered
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.model.devices import DEVICES
from earl_core.selector.model.roofline import Roofline
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of
from tools.harness import Report, Row, parser, publish


class Ways(NamedTuple):
    """Ways of predicting the sign of each cell: per cent from TP 4 to TP 8."""

    roofline: dict[Place, float]
    cell: dict[Place, float]
    row: dict[Place, float]
    column: dict[Place, float]


def speedup(predictor: Predictor, context: int, responses: int) -> float:
    """Predicted per cent from TP 4 to TP 8 in tokens per GPU and second."""
    small, _ = predictor.rate(layout(SMALL, responses), context, responses)
    large, _ = predictor.rate(layout(LARGE, responses), context, responses)
    return 100 * (large / 2 / small - 1) if small > 0 else math.inf


def predictor_without(leave_out: Excluded) -> Predictor:
    """Predictions from the grid without what is left out, and nothing else."""
    return Predictor(selection(1024.0, 8, measured(leave_out)))


def all_ways() -> Ways:
    """Each cell predicted from nothing, and from the grid without its cell, row or column."""
    bare = Predictor(selection(1024.0, 8, ProfileTable()))
    ways = Ways({}, {}, {}, {})
    for context, responses in certain():
        ways.roofline[context, responses] = speedup(bare, context, responses)

        def same_row(point: ProfilePoint, context: int = context) -> bool:
            return point.context == context

        def same_column(point: ProfilePoint, responses: int = responses) -> bool:
            return point.requests == responses

        def same_cell(
            point: ProfilePoint, row: Excluded = same_row, column: Excluded = same_column
        ) -> bool:
            return row(point) and column(point)

        for found, excluded in (
            (ways.cell, same_cell),
            (ways.row, same_row),
            (ways.column, same_column),
        ):
            found[context, responses] = speedup(predictor_without(excluded), context, responses)
    return ways


def right(predicted: dict[Place, float]) -> int:
    """Certain cells whose sign was predicted."""
    return sum((predicted[place] > 0) == (value > 0) for place, value in certain().items())


def wrong(predicted: dict[Place, float]) -> str:
    """The cells whose sign was not, for people."""
    found = [
        f"{context // 1024}K x {responses} (printed {value:+.1f}, predicted "
        f"{predicted[context, responses]:+.1f})"
        for (context, responses), value in certain().items()
        if (predicted[context, responses] > 0) != (value > 0)
    ]
    return ", ".join(found) or "nowhere"


SHARES = (0.65, 0.7, 0.8, ENGINE_SHARE, 0.9, 0.95)


class Waves(Roofline):
    """Sequences of one length run in whole waves."""

    def waves(self, offered: float, fits: float) -> float:
        return float(math.ceil(offered / math.floor(fits) - 1e-9))


class Stream(Roofline):
    """Others always fill the gaps: the most that any scheduler can reach."""

    def waves(self, offered: float, fits: float) -> float:
        return max(1.0, offered / fits)


QUEUEING = {"blurred": Roofline, "waves": Waves, "stream": Stream}


def variants() -> Iterator[tuple[str, list[int]]]:
    """Signs right at each of `SHARES` under other assumptions than the shipped ones, so that nobody
    need trust one."""
    device = DEVICES["h100-80gb"]
    for latency in (True, False):
        for queueing, kind in QUEUEING.items():
            line = kind(MODEL, device.model_copy(update={"nccl": latency}), HARDWARE)
            counts = []
            for share in SHARES:
                given = selection(1024.0, 8, ProfileTable(), engine_share=share)
                predictor = Predictor(given, line)
                counts.append(right({(c, r): speedup(predictor, c, r) for c, r in certain()}))
            name = f"queueing {queueing}, all-reduce latency {'as in NCCL' if latency else 'none'}"
            yield name, counts


class Flat(Roofline):
    """Knows nothing: every engine is as fast as its devices are many."""

    def decode_rate(
        self, tensor: int, threads: int, offered: float, context: float, capacity: float
    ) -> float:
        return float(tensor)


def without_roofline() -> dict[str, int]:
    """Signs right when the grid alone is interpolated: what the roofline adds to `all_ways`."""
    counts = {}
    ratios = {place: math.log1p(value / 100) for place, value in certain().items()}
    given = selection(1024.0, 8, ProfileTable())
    ways: dict[str, Callable[[Place, Place], bool]] = {
        "cell": lambda one, other: one == other,
        "row": lambda one, other: one[0] == other[0],
        "column": lambda one, other: one[1] == other[1],
    }
    for name, same in ways.items():
        found = {}
        for place in ratios:
            points = []
            for other, ratio in ratios.items():
                if not same(place, other):
                    load = {"context": float(other[0]), "requests": float(other[1])}
                    for tensor in (SMALL, LARGE):
                        rate = tensor * (math.exp(ratio) if tensor == LARGE else 1.0)
                        key = key_of(layout(tensor, other[1]))
                        points.append(ProfilePoint(key=key, tokens_per_second=rate, **load))
            given = given.model_copy(update={"profile": ProfileTable(points=tuple(points))})
            flat = Flat(MODEL, DEVICES["h100-80gb"], HARDWARE)
            found[place] = speedup(Predictor(given, flat), *place)
        counts[name] = right(found)
    return counts


def forbidden_at_the_end() -> str:
    """The problem that `live_tokens` names of TP 4 at 32K x 128, with the grid as its profile."""
    given = selection(32768.0, 128, measured())
    rows = considered(given).predictions["rollout"]
    return next((r.problem for r in rows if r.candidate.tensor_parallel == SMALL), "")


def report(steps: int) -> Report:
    """Everything as one report."""
    made = Report(
        "selector_paper", "The selector against the paper's grid (TP 4 to TP 8, per cent)"
    )
    ways = all_ways()
    for (context, responses), value in cells():
        row: Row = {"context": f"{context // 1024}K", "responses": responses}
        row["printed"] = "TP 4 out of memory" if value is None else f"{value:+.1f}"
        for name, found in zip(Ways._fields, ways, strict=True):
            shown = found.get((context, responses))
            row[f"without its {name}" if name != "roofline" else name] = (
                "" if shown is None else f"{shown:+.1f}"
            )
        made.rows.append(row)
    made.headline["roofline_cells_right"] = right(ways.roofline)
    made.headline["grid_cells_right"] = min(map(right, ways[1:]))
    for name, found in zip(Ways._fields, ways, strict=True):
        made.notes.append(f"{name}: {right(found)} of {len(certain())}; wrong: {wrong(found)}.")
    problem = forbidden_at_the_end()
    made.headline["forbids_tp4_at_32k_x_128"] = float(bool(problem))
    made.notes.append(f"TP 4 at 32K x 128 with the grid as profile: {problem or 'not forbidden'}.")
    _add_regrets(made, steps)
    counts = ", ".join(f"{count} without its {name}" for name, count in without_roofline().items())
    made.notes.append(f"The grid alone, interpolated with no roofline beneath it: {counts}.")
    shares = ", ".join(f"{share:g}" for share in SHARES)
    for name, found_right in variants():
        listed = ", ".join(map(str, found_right))
        made.notes.append(f"Roofline, {name}: {listed} right with an engine's share of {shares}.")
    made.notes.append(_figures())
    return made


def _add_regrets(made: Report, steps: int) -> None:
    names = {
        "fixed TP 4": "regret_fixed_tp4",
        "fixed TP 8": "regret_fixed_tp8",
        "average_context measured at 32": "regret_average_context",
        "live_tokens, grid as profile": "regret_live_tokens",
        "live_tokens, roofline only": "regret_live_tokens_roofline",
    }
    made.notes.append(
        f"Growth: {steps} iterations from 1K to 32K; truth: the printed grid, linear in octaves; a "
        f"switch costs {SWITCH_SHARE:g} of a rollout at TP 4 (assumed); policies see contexts of "
        "finished iterations only. Regret: time over the best schedule in hindsight, less one."
    )
    for name, lost, failures, switches in regrets(steps):
        each = ", ".join(
            f"{100 * value:.1f} % at {responses}"
            for value, responses in zip(lost, RESPONSES, strict=True)
        )
        made.notes.append(
            f"{name}: {100 * sum(lost) / len(lost):.1f} % on average ({each}); {failures} times "
            f"out of memory, {switches} switches."
        )
        if name in names:
            made.headline[names[name]] = sum(lost) / len(lost)


def _figures() -> str:
    device = DEVICES["h100-80gb"]
    return (
        f"Figures used: {device.source}; {device.memory_bytes / 2**30:.0f} GiB. Beside them: the "
        f"engine's share of the memory as EARL ships it ({ENGINE_SHARE:g}), 1 GiB a process for "
        "libraries, 8,192 prompt tokens in one pass, and NCCL's own latencies of a ring all-reduce "
        "(6.6 us and 0.6 us a hop, src/graph/tuning.cc, LL). Nothing was fitted to the grid. The "
        "printed ratios fit engines that get the same number of responses each."
    )


def main() -> None:
    """Command line."""
    options: argparse.Namespace = parser(__doc__ or "").parse_args()
    publish(report(12 if options.quick else 36), options)


if __name__ == "__main__":
    main()

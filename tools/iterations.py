"""Times of a run's iterations, read from its directory; nothing is instrumented."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from earl_core.deployment.stages import STAGES
from earl_core.run.record import read_lines

Span = tuple[float, float]


@dataclass(frozen=True)
class IterationTime:
    """One iteration, in seconds.

    wall: from the end of the iteration before it to its own end, less evaluations between them.
    stages: time inside each stage's body. inside: time in which at least one body ran, so that
    stages side by side count once. tokens: context tokens of its samples.
    """

    number: int
    wall: float
    stages: dict[str, float]
    inside: float
    tokens: float
    games: float

    @property
    def share(self) -> float:
        """Part of the wall time that was spent outside of every stage body."""
        return max(0.0, self.wall - self.inside) / self.wall


def read_iterations(run: Path, numbers: Iterable[int] | None = None) -> list[IterationTime]:
    """The iterations of a run that one attempt did from end to end, ascending.

    numbers: only these. The run's first iteration has no end before it and is never among them.
    An iteration's end is its line in metrics.jsonl; the starts of the bodies are in ledger.jsonl.
    """
    lines = {line["iteration"]: line for line in read_lines(run / "metrics.jsonl")}
    ledger = read_lines(run / "ledger.jsonl")
    attempts: dict[int, set[int]] = {}
    starts: dict[tuple[int, str], float] = {}
    evaluations: list[Span] = []
    for entry in ledger:
        number, stage = entry["iteration"], entry["stage"]
        if entry["event"] == "started":
            starts[number, stage] = entry["time"]
            attempts.setdefault(number, set()).add(entry["attempt"])
        elif entry["event"] == "sealed" and stage == "evaluation":
            evaluations.append((starts[number, stage], entry["time"]))
    wanted = set(lines if numbers is None else numbers)
    found = []
    for number in sorted(wanted & set(lines)):
        before = lines.get(number - 1)
        if before is None or len(attempts.get(number, set()) | attempts[number - 1]) != 1:
            continue
        line, window = lines[number], (before["time"], lines[number]["time"])
        between = sum(max(0.0, min(b, window[1]) - max(a, window[0])) for a, b in evaluations)
        stages = {
            stage: line[f"{stage}/stage_seconds"]
            for stage in STAGES
            if f"{stage}/stage_seconds" in line
        }
        spans = [
            (starts[number, stage], starts[number, stage] + seconds)
            for stage, seconds in stages.items()
            if (number, stage) in starts
        ]
        games = float(line.get("rollout/episodes", 0.0))
        found.append(
            IterationTime(
                number=number,
                wall=window[1] - window[0] - between,
                stages=stages,
                inside=covered(spans, window),
                tokens=games * float(line.get("rollout/context/mean", 0.0)),
                games=games,
            )
        )
    return found


def covered(spans: Iterable[Span], window: Span) -> float:
    """Seconds of the window that lie in at least one span."""
    total, reached = 0.0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total += end - start
            reached = end
    return total

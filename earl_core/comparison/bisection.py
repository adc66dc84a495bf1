"""The first stage of the first iteration whose inputs are equal and whose outputs differ.

Stages are compared in the order of their work: the first whose outputs differ has read what is
equal. Seals are kept for good; rows are looked at where shards or kept episodes hold them, weights
where both runs have the checkpoint. Plans are compared aside: another plan is no other data, but it
may be the cause of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from earl_core.comparison.causes import Cause, Seals, Sides, causes
from earl_core.comparison.recorded_run import INITIAL, Place, RecordedRun
from earl_core.comparison.rows import RowDifference, compare_rows
from earl_core.comparison.seals import compare_seals, metric_changes
from earl_core.comparison.weights import TensorDifference, compare_tensors
from earl_core.deployment.stages import ROWS, STAGES, stage_of
from earl_core.dispatch import ManifestError
from earl_core.pretrained.adapter_directory import policy_in
from earl_core.run.checkpoints import state_path, verify_checkpoint
from earl_core.run.episodes import EpisodesDamaged
from earl_core.system.errors import ConfigError, EarlError

_DAMAGED = Cause(
    "damage",
    "files of the iteration do not hold what was written or sealed: the stage may have read "
    "something else than the seals of its inputs say",
)


@dataclass(frozen=True)
class Difference:
    """A stage whose outputs differ.

    inputs: what it has read, and whether that is equal. outputs: what its seals say otherwise.
    rows, source: the first rows that differ, and where they come from; None where only digests are
    left, or no row differs. weights: of the checkpoints after an update. metrics: of both seals.
    """

    iteration: int
    stage: str
    inputs: list[str]
    outputs: list[str]
    rows: RowDifference | None = None
    source: str = ""
    weights: TensorDifference | None = None
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    causes: list[Cause] = field(default_factory=list)


@dataclass(frozen=True)
class PlanDifference:
    """The first iteration whose stages are laid out otherwise."""

    iteration: int
    changes: list[str]


@dataclass(frozen=True)
class Bisection:
    """What was found. labels: of both runs. compared: stages whose seals both have, up to the first
    difference; until: the last of them. notes: what could not be told, and what is no difference of
    data. damage: files that do not hold what was written, or sealed."""

    labels: tuple[str, str]
    compared: int
    until: tuple[int, str]
    difference: Difference | None
    plan: PlanDifference | None
    notes: list[str]
    damage: list[str]


def bisect(one: RecordedRun, other: RecordedRun) -> Bisection:
    """Compare two runs, either of which may go on meanwhile, be a fork of the other, or a copy.

    Raises `ConfigError` for runs that have sealed no stage of the same iteration.
    """
    return _Search((one, other)).result()


class _Search:
    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._notes: list[str] = []
        self._damage: dict[str, None] = {}
        self._plan: PlanDifference | None = None
        self._there = [set(run.places()) for run in sides]

    def result(self) -> Bisection:
        shared = self._there[0] & self._there[1]
        if not shared:
            labels = " and ".join(run.label for run in self._sides)
            raise ConfigError(
                f"{labels} have sealed no stage of the same iteration: there is nothing to compare"
            )
        last = max(shared)
        both = {place.iteration for place in shared}
        every = sorted(self._there[0] | self._there[1])
        compared, difference = 0, None
        until = last
        for place in every:
            # What one run alone has done is of later, or of a past that the other has not kept.
            if place > last or place.iteration not in both:
                continue
            compared, until = compared + 1, place
            difference = self._at(place)
            if difference is not None:
                break
        self._look_for_damage(sorted(shared), until, whole=difference is None)
        if difference is not None and self._damage:
            named = [cause for cause in difference.causes if cause.kind != "none"]
            difference = replace(difference, causes=[*named, _DAMAGED])
        return Bisection(
            (self._sides[0].label, self._sides[1].label),
            compared,
            (until.iteration, until.stage),
            difference,
            self._plan,
            self._notes,
            list(self._damage),
        )

    def _at(self, place: Place) -> Difference | None:
        if any(place not in there for there in self._there):
            return None if place.stage == INITIAL or self._may_come(place) else self._lone(place)
        seals = self._seals(place)
        if seals is None:
            return None
        verdict, texts = compare_seals(*seals)
        if place.stage == "select":
            if verdict == "other" and self._plan is None:
                self._plan = PlanDifference(place.iteration, texts)
            return None
        if verdict == "equal":
            return None
        rows, source = self._rows(seals)
        if verdict == "untold" and (rows is None or rows.equal):
            known = "its rows are gone" if rows is None else f"the rows are equal in the {source}"
            self._notes.append(
                f"iteration {place.iteration}, {place.stage}: {'; '.join(texts)}, and {known}"
            )
            return None
        draws = rows.draws if rows is not None and stage_of(place.stage) in ROWS else None
        return Difference(
            iteration=place.iteration,
            stage=place.stage,
            inputs=list(self._inputs(place)),
            outputs=texts,
            rows=None if rows is None or rows.equal else rows,
            source=source,
            weights=self._weights(place),
            metrics=metric_changes(*seals),
            causes=causes(self._sides, place, seals, draws),
        )

    def _seals(self, place: Place) -> Seals | None:
        try:
            return self._sides[0].manifest(place), self._sides[1].manifest(place)
        except ManifestError as error:
            self._damage[str(error)] = None
            return None

    def _may_come(self, place: Place) -> bool:
        """Tell whether a run was stopped before the stage, or is about to do it: others run beside
        it, and nothing that reads it was sealed."""
        lacks = next(there for there in self._there if place not in there)
        own = [stage_of(each.stage) for each in lacks if each.iteration == place.iteration]
        read = any(stage_of(place.stage) in STAGES[name].reads for name in own if name in STAGES)
        return place.iteration == max(lacks).iteration and not read

    def _lone(self, place: Place) -> Difference:
        has, lacks = self._sides
        if place not in self._there[0]:
            has, lacks = lacks, has
        told = f"{has.label} has sealed it, {lacks.label} has not"
        found = causes(self._sides, place, None, None)
        return Difference(place.iteration, place.stage, [], [told], causes=found)

    def _inputs(self, place: Place) -> Iterator[str]:
        try:
            sources = self._sides[0].sources(place)
        except ManifestError as error:
            yield f"not told: {error}"
            return
        for source in sources:
            seals = None
            with suppress(ManifestError):
                seals = self._sides[0].manifest(source), self._sides[1].manifest(source)
            where = (
                "" if source.iteration == place.iteration else f" of iteration {source.iteration}"
            )
            told = "not told: its seal is gone" if seals is None else compare_seals(*seals).verdict
            lies = "equal, but divided among shards otherwise" if told == "untold" else told
            yield f"{source.stage}{where}: {lies}"
        if not sources and place.stage == INITIAL:
            yield "none: the runs begin with these weights"

    def _rows(self, seals: Seals) -> tuple[RowDifference | None, str]:
        found = []
        for run, sealed in zip(self._sides, seals, strict=True):
            try:
                found.append(run.rows(sealed))
            except (EpisodesDamaged, ManifestError) as error:
                self._damage[str(error)] = None
                return None, ""
        one, other = found
        if one is None or other is None:
            return None, ""
        source = one.source if one.source == other.source else f"{one.source} and {other.source}"
        return compare_rows(one.table, other.table), source

    def _weights(self, place: Place) -> TensorDifference | None:
        stage = stage_of(place.stage)
        if stage not in STAGES or STAGES[stage].makes != "state":
            return None
        folders = [run.checkpoint(place.iteration) for run in self._sides]
        if None in folders:
            return None
        try:
            paths = [policy_in(state_path(folder, stage)) for folder in folders if folder]
            return compare_tensors(*paths)
        except (OSError, EarlError) as error:
            self._damage[str(error)] = None
            return None

    def _look_for_damage(self, shared: list[Place], until: Place, whole: bool) -> None:
        """Look whether rows and checkpoints are what was sealed: of all iterations where nothing
        differs, else of the one that does, whose stages may have read something else."""
        looked = [each for each in shared if whole or each.iteration == until.iteration]
        for place in looked:
            seals = self._seals(place)
            if seals is None or place > until:
                continue
            for run, sealed in zip(self._sides, seals, strict=True):
                for text in run.damage(sealed):
                    self._damage[f"{run.label}: {text}"] = None
            self._compare_kept(place, seals)
        for run in self._sides if whole else ():
            for iteration in sorted({place.iteration for place in shared}):
                if run.checkpoint(iteration) is None:
                    continue
                try:
                    verify_checkpoint(run.path, iteration)
                except EarlError as error:
                    self._damage[str(error)] = None

    def _compare_kept(self, place: Place, seals: Seals) -> None:
        if stage_of(place.stage) not in (*ROWS, "reward"):
            return
        if compare_seals(*seals).verdict != "equal":
            return
        rows, source = self._rows(seals)
        if rows is None or rows.equal:
            return
        cells = [cell for row in rows.rows for cell in row.cells]
        first = f", first in column {cells[0].column}" if cells else ""
        ids = f" of sample {rows.rows[0].ids['sample_id']}" if rows.rows else ""
        self._damage[
            f"iteration {place.iteration}, {place.stage}: the {source} differ{first}{ids}, though "
            "what was sealed is equal: bytes have changed after the seal"
        ] = None

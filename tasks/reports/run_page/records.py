"""Records of a run in its directory; read without locking it, so the run may go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from earl_core.config import RunConfig
from earl_core.config.redaction import redaction_of
from earl_core.deployment.plan import DeploymentPlan
from earl_core.dispatch import Manifest, ManifestError, read_manifest
from earl_core.run.episodes import NAME
from earl_core.run.lock import is_locked
from earl_core.run.record import RunDamaged, read_lines, read_record, stored_config
from earl_core.secrets import shareable_names
from earl_core.secrets.rules import Redaction
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import Observation
from earl_core.system.files import read_file

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """A run as its directory tells it.

    state: finished, running or stopped. iterations, evaluations: a mapping of numbers each,
    ascending by `iteration`. plans: the sealed ones, ascending. selection: the newest input of the
    selector, None where there is none. failures: by reason, how many episodes failed and where.
    redaction: what episodes pass before others see them. Numbers whose names it changes are left
    out.
    """

    path: Path
    config: RunConfig
    redaction: Redaction
    record: Mapping[str, Any]
    state: str
    iterations: Sequence[Line]
    evaluations: Sequence[Line]
    plans: Sequence[DeploymentPlan]
    observations: Sequence[Observation]
    selection: SelectionInput | None
    ledger: Sequence[Line]
    failures: Mapping[str, tuple[int, list[int]]]

    @property
    def episode_files(self) -> list[Path]:
        """The files of kept episodes, by ascending iteration."""
        return sorted(self.path.glob(f"iterations/[0-9]*/{NAME}"))

    @property
    def tokenizer_files(self) -> Iterator[Path]:
        """Yield the places where the policy's tokenizer may lie, the newest checkpoint's first."""
        for policy in sorted(self.path.glob("checkpoints/[0-9]*/policy"), reverse=True):
            yield policy / "tokenizer.json"
        yield Path(self.config.initial_model.path) / "tokenizer.json"


def read_records(path: Path, iterations: Sequence[Line], evaluations: Sequence[Line]) -> RunRecords:
    """Everything about a run but its episodes; what is damaged is left out. Raises `ConfigError`
    where no run lies, one that this version cannot read, or one whose rules of redaction are
    gone."""
    record: Mapping[str, Any] = {}
    with suppress(FileNotFoundError, RunDamaged):
        record = read_record(path)
    running = "running" if is_locked(path) else "stopped"
    config = stored_config(path)
    redaction = redaction_of(config)
    return RunRecords(
        path=path,
        config=config,
        redaction=redaction,
        record=record,
        state="finished" if record.get("finished") is True else running,
        iterations=[shareable_names(line) for line in iterations],
        evaluations=[shareable_names(line) for line in evaluations],
        plans=list(_plans(path)),
        observations=list(_observations(path)),
        selection=_selection(path),
        ledger=read_lines(path / "ledger.jsonl"),
        failures=_failures(path, iterations),
    )


def _manifests(path: Path, stage: str) -> Iterator[Manifest]:
    for sealed in sorted(path.glob(f"iterations/[0-9]*/{stage}.json")):
        with suppress(ManifestError):
            yield read_manifest(sealed)


def _plans(path: Path) -> Iterator[DeploymentPlan]:
    for manifest in _manifests(path, "select"):
        with suppress(KeyError, ValidationError):
            yield DeploymentPlan.model_validate(manifest.outputs["plan"])


def _observations(path: Path) -> Iterator[Observation]:
    for line in read_lines(path / "selector.jsonl"):
        with suppress(ValidationError):
            yield Observation.model_validate(line)


def _selection(path: Path) -> SelectionInput | None:
    for file in sorted(path.glob("iterations/[0-9]*/selection.input"), reverse=True):
        with suppress(OSError, ValidationError):
            return SelectionInput.model_validate_json(read_file(file))
    return None


def _failures(path: Path, lines: Sequence[Line]) -> dict[str, tuple[int, list[int]]]:
    """Count the reasons of failed episodes, of finished iterations with some and of the one that is
    not finished."""
    whole = {line["iteration"] for line in lines if not line.get("rollout/episodes_failed")}
    counts: Counter[str] = Counter()
    where: dict[str, list[int]] = {}
    for sealed in sorted(path.glob("iterations/[0-9]*/rollout.json")):
        if (iteration := int(sealed.parent.name)) in whole:
            continue
        with suppress(ManifestError):
            for reason, count in read_manifest(sealed).outputs.get("failures", {}).items():
                counts[reason] += int(count)
                where.setdefault(reason, []).append(iteration)
    return {reason: (count, where[reason]) for reason, count in counts.most_common()}

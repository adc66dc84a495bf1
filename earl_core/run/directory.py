"""The run directory, the only truth about a run.

runs/<name>/
  run.json                       uid, finished, tracking ids, branches, the last settings
  config.yaml                    the resolved configuration
  lock                           held by the live controller
  ledger.jsonl                   what each attempt really executed
  metrics.jsonl, selector.jsonl  a line per finished iteration; what was observed of the stages
  system.jsonl, progress.json    how loaded the machine was; how far stages that go on are
  probe.json                     recorded episodes that sources of rewards are asked for again
  groups.jsonl, parked/          groups that were sealed one by one, and what others had played
  iterations/000012/rollout.json sealed manifests, one per stage
  iterations/000012/episodes.parquet  the iteration's episodes (`earl_core.run.episodes`)
  ancestor/, adapter/, references/  the weights that it began with, and its teachers
  checkpoints/000012/            policy/, optimizer, state; STABLE is written last
  weights/                       older versions that rollouts to come play, if they are stale
  logs/attempt_1/                worker logs
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from earl_core.config import ConfigError, RunConfig, dump_config
from earl_core.config.redaction import redaction_of
from earl_core.deployment.plan import DeploymentPlan
from earl_core.dispatch import Manifest, ManifestError, ShardEntry, ShardStore, read_manifest
from earl_core.dispatch.shards.manifest import sealed_path, write_manifest
from earl_core.dispatch.spill.storage import SpillError
from earl_core.guard.detectors import is_compared
from earl_core.run.branches import Branches
from earl_core.run.checkpoints import (
    MARKER,
    best_evaluated,
    best_to_keep,
    gated_returns,
    remove_checkpoint,
    remove_leftovers,
    stable_checkpoints,
)
from earl_core.run.group_journal import GroupJournal
from earl_core.run.known_numbers import KnownNumbers
from earl_core.run.lock import RunLock
from earl_core.run.policy_versions import PolicyVersions
from earl_core.run.record import (
    INHERITED,
    STALENESS,
    Journal,
    changed_settings,
    check_not_copied,
    checked_uid,
    given_in,
    open_record,
    place_of,
    played_in,
    settings_of,
    staleness_over_iterations,
    write_record,
)
from earl_core.run.remote_stores import HostStores
from earl_core.run.retention import first_kept, keeps_shards, kept_checkpoints
from earl_core.run.run_stores import claim, run_spill, run_store
from earl_core.secrets import redact
from earl_core.system.files import FileLock, make_directory, write_atomic

logger = logging.getLogger(__name__)

_IDENTITY = ("seed", "model")
"""Settings that make a run another one, beside what is played. The rest may change when it is
resumed: how many episodes may fail, how many hosts there are, how long they may take, and so on."""


class RunDirectory:
    """An opened run: locked by this process until `close()`. observations: what the selector learns
    from. versions: its policy versions. branches: those that it has had when it was opened.
    redaction: what episodes pass where they leave it."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self._record_lock = threading.Lock()
        self._lock = RunLock(path)
        self._store_lock: FileLock | None = None
        try:
            self._load()
        except BaseException:
            self._unlock()
            raise

    def _load(self) -> None:
        self.redaction = redaction_of(self.config)
        self.record: dict[str, Any] = open_record(self.path)
        check_not_copied(self.path, checked_uid(self.record, self.path), self.record.get("place"))
        self._check_same_run()
        over = self.record, self.config.schedule.pinned, self.last_stable() + 1
        self.versions = PolicyVersions(self.path, staleness_over_iterations(*over))
        self.branches = Branches.of(self.record)
        self.store: ShardStore = run_store(self.path, self.config)
        self.stores = HostStores(self.store)
        self.groups = GroupJournal(self.path)
        self._store_lock = claim(self.store, self.path)
        self.update_record(
            attempts=self.record["attempts"] + 1, finished=False, place=place_of(self.path)
        )
        for name in ("iterations", "checkpoints"):
            make_directory(self.path / name)
        remove_leftovers(self.path)
        if not (self.path / "config.yaml").exists():
            self.store_config()
        self.store.adopt(self.unreleased_shards())
        self.spill = run_spill(self.path, self.config)
        self._verified: set[str] = set()
        self._ledger = Journal(self.path / "ledger.jsonl")
        self._metrics = Journal(self.path / "metrics.jsonl")
        self.numbers = KnownNumbers(self._metrics.path, is_compared)
        self.observations = Journal(self.path / "selector.jsonl")
        self.logs = self.path / "logs" / f"attempt_{self.attempt}"
        self.logs.mkdir(parents=True, exist_ok=True)

    def _check_same_run(self) -> None:
        """Refuse settings that make it another run; say which of the others changed."""
        if "settings" not in self.record:
            return
        before, now = self.record["settings"], settings_of(self.config)
        different = [part for part in _IDENTITY if given_in(before, part) != given_in(now, part)]
        if played_in(before) != played_in(now):
            different.append("environment")
        if different:
            raise ConfigError(
                f"the run directory {self.path} belongs to a run with another "
                f"{' and '.join(different)}: choose another name (--name), or remove the directory"
            )
        for change in changed_settings(self.record, self.config):
            logger.warning("the run goes on with a changed setting: %s", change)

    @classmethod
    def open(cls, config: RunConfig) -> RunDirectory:
        """Create the run or go on with it; each setting that changed since is logged.

        A run that exists keeps its stored configuration until `store_config`.

        Raises `InUse` when a live process holds it, `ConfigError` when the directory belongs to a
        run of another model, environment or seed, `RunDamaged` when run.json was lost or edited.
        """
        path = Path(config.runs_directory) / config.name
        make_directory(path, mode=0o700)
        return cls(path, config)

    @property
    def uid(self) -> str:
        """Identifies the run across machines and names its shards."""
        return str(self.record["uid"])

    @property
    def attempt(self) -> int:
        """Number of times the run was started, this time included."""
        return int(self.record["attempts"])

    def update_record(self, **values: Any) -> None:
        """Change fields of run.json, atomically; any thread may."""
        with self._record_lock:
            self.record = {**self.record, **values}
            write_record(self.path, self.record)

    def store_config(self) -> None:
        """Make the configuration that the run was opened with the one that a resume reads. For
        whoever has found that the run can work with it: what is refused must not be stored."""
        write_atomic(self.path / "config.yaml", dump_config(self.config).encode())
        self.update_record(
            settings=settings_of(self.config), **{STALENESS: self.versions.staleness}
        )

    # Sealed stages

    def stage_path(self, iteration: int, stage: str) -> Path:
        """Return the path of a stage's sealed manifest."""
        return sealed_path(self.path, iteration, stage)

    def rewards(self, iteration: int) -> dict[str, Any]:
        """Return the outputs of an earlier iteration's rewards; none of one that has imitated, as
        its seals say, whatever the settings are now. Raises `ManifestError`."""
        imitated = self.stage_path(iteration, "demonstrate").exists()
        if imitated and not self.stage_path(iteration, "reward").exists():
            return {}
        return self.manifest(iteration, "reward").outputs

    def episodes_path(self, iteration: int) -> Path:
        """Return the path of an iteration's kept episodes."""
        return self.stage_path(iteration, "episodes").with_suffix(".parquet")

    def seal(self, manifest: Manifest) -> Manifest:
        """Write a stage's manifest; from then on the stage is finished."""
        path = self.stage_path(manifest.iteration, manifest.stage)
        # A stage may be repeated after its shards were released: these are others.
        path.with_suffix(".released").unlink(missing_ok=True)
        sealed = write_manifest(path, manifest)
        self._verified.add(sealed.digest)
        self._spill(sealed)
        self.note(manifest.iteration, manifest.stage, "sealed")
        return sealed

    def _spill(self, manifest: Manifest) -> None:
        if self.spill is not None:
            self.spill.submit(manifest.shards)

    def manifest(self, iteration: int, stage: str) -> Manifest:
        """Read a sealed manifest of this run; raises `ManifestError`."""
        manifest = read_manifest(self.stage_path(iteration, stage))
        if manifest.run != self.uid:
            raise ManifestError(f"{self.stage_path(iteration, stage)} belongs to another run")
        return manifest

    def plan(self, iteration: int) -> DeploymentPlan | None:
        """The sealed plan of an iteration; None where there is none that can be read."""
        try:
            sealed = self.manifest(iteration, "select")
            return DeploymentPlan.model_validate(sealed.outputs["plan"])
        except (ManifestError, ValidationError, KeyError):
            return None

    def sealed(self, iteration: int, stage: str, key: str) -> Manifest | None:
        """The stage's manifest if it carries this key and its shards are there and whole.

        Checksums are verified once per attempt for what an earlier attempt wrote. A shard that
        shared memory lost comes back from the spill, if the run has one.
        """
        if not self.stage_path(iteration, stage).exists():
            return None
        try:
            manifest = self.manifest(iteration, stage)
            if manifest.key != key:
                return None
            for entry in manifest.shards:
                self.check_shard(entry, checksum=manifest.digest not in self._verified)
        except (ManifestError, SpillError) as error:
            self.note(iteration, stage, f"not usable: {error}")
            return None
        if manifest.digest not in self._verified:
            # What the last attempt did not get to copying; there already, it costs a look.
            self._spill(manifest)
        self._verified.add(manifest.digest)
        return manifest

    def check_shard(self, entry: ShardEntry, checksum: bool) -> None:
        """Verify a shard, which comes back from the spill where shared memory has lost it. Raises
        `ManifestError`, `SpillError`."""
        try:
            self.stores.verify(entry, checksum=checksum)
        except ManifestError:
            if self.spill is None or not self.stores.release(entry):
                raise
            self.store.reserve(entry.bytes)
            self.spill.restore(entry)
            self.store.verify(entry, checksum=True)

    def evaluations(self) -> list[Manifest]:
        """The sealed evaluations, by ascending policy version; damaged ones are left out."""
        found = []
        for path in sorted((self.path / "iterations").glob("*/evaluation.json")):
            with suppress(ManifestError, ValueError):
                found.append(self.manifest(int(path.parent.name), "evaluation"))
        return found

    # Checkpoints

    def checkpoint_path(self, iteration: int) -> Path:
        """The checkpoint taken at the end of an iteration."""
        return self.path / "checkpoints" / f"{iteration:06d}"

    def stable_iterations(self) -> list[int]:
        """Iterations whose checkpoint is whole, ascending."""
        return stable_checkpoints(self.path)

    def last_stable(self) -> int:
        """The last iteration covered by a STABLE checkpoint; -1 when there is none."""
        return max(self.stable_iterations(), default=-1)

    def best_stable(self) -> int | None:
        """The last iteration before the best evaluation of those whose checkpoint is there and
        that no gate keeps out."""
        returns = gated_returns(self.evaluations(), self.config.gates)
        return best_evaluated(self.path, returns)

    def mark_stable(self, iteration: int) -> None:
        """Declare the checkpoint whole; drop older ones and the shards it covers."""
        made = self.versions.update(iteration).made
        marker = {"iteration": iteration, "policy_version": made, "time": time.time()}
        write_atomic(self.checkpoint_path(iteration) / MARKER, json.dumps(marker).encode())
        self.note(iteration, "checkpoint", "stable")
        self.release_through(iteration)

    def prune_checkpoints(self, also: Collection[int] = ()) -> None:
        """Remove old checkpoints but the last `keep_last`, the one that was evaluated best, those
        that are still to be evaluated, unfinished ones, and those of the iterations `also`. One
        that is held (`holding_checkpoint`) goes at the next pruning."""
        stable = self.stable_iterations()
        best = best_to_keep(self.path, self.evaluations(), self.config.gates)
        kept = kept_checkpoints(stable, self.config.checkpoint.keep_last, best)
        kept |= {each for each in stable if self._to_evaluate(self.versions.update(each).made)}
        for iteration in stable:
            if iteration not in kept.union(also):
                remove_checkpoint(self.checkpoint_path(iteration))

    def _to_evaluate(self, version: int) -> bool:
        return (
            self.config.evaluates(version) and not self.stage_path(version, "evaluation").is_file()
        )

    def release_through(self, iteration: int) -> None:
        """Release the shards that nobody needs once a checkpoint covers this iteration."""
        for path in sorted((self.path / "iterations").glob("*/*.json")):
            if path.parent.name.isdigit() and not path.with_suffix(".released").exists():
                self._release(path, iteration)

    def unreleased_shards(self) -> set[str]:
        """Files of all shards that sealed manifests name and nobody released."""
        first, schedule = self.last_stable() + 1, self.config.schedule
        size = self.config.rollout.prompts_per_iteration
        files: set[str] = set()
        if schedule.streams:
            files = self.groups.files(first_kept(first, schedule.trained_again) * size)
        for path in (self.path / "iterations").glob("*/*.json"):
            if not path.with_suffix(".released").exists():
                # A damaged manifest names nothing: its stage is repeated.
                with suppress(ManifestError):
                    files |= {entry.file for entry in read_manifest(path).shards}
        return files

    def _release(self, path: Path, covered: int) -> None:
        try:
            manifest = read_manifest(path)
        except ManifestError:
            return
        if keeps_shards(manifest, covered, self.config.schedule.trained_again):
            return
        held = [entry.file for entry in manifest.shards if not self.stores.release(entry)]
        if not held:
            if self.spill is not None:
                self.spill.release([entry.file for entry in manifest.shards])
            path.with_suffix(".released").touch()

    # Records: what an append wrote is on disk when it returns

    def note(self, iteration: int, stage: str, event: str, **told: Any) -> None:
        """Append to the ledger what was really executed. told: more of the line's entries."""
        line = {
            "time": round(time.time(), 3),
            "attempt": self.attempt,
            "iteration": iteration,
            "stage": stage,
            "event": redact(event),
            **told,
        }
        self._ledger.append(line)

    def ledger(self) -> list[dict[str, Any]]:
        """All ledger lines, oldest first."""
        return self._ledger.read()

    def append_metrics(self, iteration: int, metrics: dict[str, float]) -> None:
        """Append one iteration's metrics; the last line of an iteration counts."""
        self._metrics.append({"iteration": iteration, "time": time.time(), **metrics})

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per finished iteration, ascending."""
        latest = {line["iteration"]: line for line in self._metrics.read()}
        return [latest[iteration] for iteration in sorted(latest)]

    def finish(self) -> None:
        """The run is done: nothing of it stays in shared memory or in the spill."""
        self.update_record(finished=True)
        shutil.rmtree(self.path / INHERITED, ignore_errors=True)
        if self.spill is not None:
            self.spill.remove()
        self.stores.remove()

    def close(self) -> None:
        """Let copies to the spill finish, give unused memory back, unlock the run."""
        try:
            self.stores.trim()
            if self.spill is not None:
                self.spill.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._store_lock is not None:
            self._store_lock.release()
        self._lock.release()

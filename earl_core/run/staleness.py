"""The staleness of a run over its iterations, for a resume may change it.

A change counts from the first iteration that no STABLE checkpoint covers. Where it was raised,
versions older than the kept ones would be asked for: `PolicyVersions.played` says what is played.
"""

from __future__ import annotations

from contextlib import suppress

from earl_core.dispatch import ManifestError
from earl_core.run.directory import RunDirectory
from earl_core.run.record import noted_staleness


def note_change(run: RunDirectory) -> None:
    """Write into the ledger what becomes of the sealed rollouts where the staleness has changed
    since the run was opened last."""
    now = run.versions.staleness
    if noted_staleness(run.record) in (None, now):
        return
    since, staleness = now[-1]
    for iteration in range(since, run.config.iterations):
        with suppress(ManifestError):
            played = run.manifest(iteration, "rollout").policy_version
            wanted = run.versions.played(iteration)
            told = f"schedule.staleness is {staleness} now: "
            if played == wanted:
                told += f"policy version {played} still fits"
            else:
                told += f"played again by policy version {wanted}, not {played}"
            run.note(iteration, "rollout", told)

"""Groups that are trained again: what the seal of `collect` says of them.

The seal names their shards beside those of its own batch's groups. They are rows of the update like
others; nothing counts them as episodes that were played.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earl_core.config import RunConfig
from earl_core.dispatch import Manifest
from earl_core.run.group_journal import SealedGroup

_REPLAYED = "replayed"
_SETTINGS = "replay"


def replay_outputs(config: RunConfig, groups: Sequence[SealedGroup]) -> dict[str, Any]:
    """Outputs of a seal that trains these groups again, under the settings of now."""
    if config.schedule.replay is None:
        return {}
    versions = {version: digest for each in groups for version, digest in each.versions.items()}
    told = {
        "groups": sorted(each.group for each in groups),
        "files": sorted(entry.file for each in groups for entry in each.shards),
        "versions": {str(version): versions[version] for version in sorted(versions)},
    }
    return {_REPLAYED: told, _SETTINGS: config.schedule.replay.model_dump(mode="json")}


def replay_metrics(
    config: RunConfig, groups: Sequence[SealedGroup], iteration: int, episodes: int, own: int
) -> dict[str, float]:
    """Metrics of a batch that trains these groups again. episodes: theirs. own: groups that are
    trained for the first time, which have rows."""
    if config.schedule.replay is None:
        return {}
    ages = [age_of(each, iteration) for each in groups]
    metrics = {
        "groups_replayed": float(len(groups)),
        "episodes_replayed": float(episodes),
        "replayed_share": len(groups) / max(1, own + len(groups)),
    }
    if ages:
        metrics |= {"replayed_age_mean": sum(ages) / len(ages), "replayed_age_max": max(ages)}
    return metrics


def age_of(group: SealedGroup, iteration: int) -> float:
    """Versions between a group's oldest token and the one that the iteration trains."""
    return float(iteration - min(group.versions))


def changed_replay(config: RunConfig, collected: Manifest) -> bool:
    """Tell whether the batch was collected under other settings of replay."""
    now = config.schedule.replay
    told = None if now is None else now.model_dump(mode="json")
    return bool(collected.outputs.get(_SETTINGS) != told)


def replayed_groups(rows: Manifest) -> tuple[int, ...]:
    """The numbers of the groups that an iteration trains again, ascending. rows: the seal of the
    stage that wrote its rows."""
    return tuple(rows.outputs.get(_REPLAYED, {}).get("groups", ()))


def replayed_versions(rows: Manifest) -> dict[int, str]:
    """The digests of the versions that have sampled these groups."""
    told = rows.outputs.get(_REPLAYED, {}).get("versions", {})
    return {int(version): str(digest) for version, digest in told.items()}


def new_rows(rows: Manifest) -> Manifest:
    """The seal without the shards of groups that are trained again: the episodes that the iteration
    has played."""
    again = frozenset(rows.outputs.get(_REPLAYED, {}).get("files", ()))
    if not again:
        return rows
    own = tuple(entry for entry in rows.shards if entry.file not in again)
    return rows.model_copy(update={"shards": own})

"""The prompts of an iteration, played at once or in waves.

Where groups whose episodes score alike leave the batch, each wave of prompts is played and scored,
and sealed, by itself. The seals of `rollout` and `reward` then name the shards of all waves, and
which episodes are trained on: whatever reads these two sees one batch, and no row is copied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from earl_core.config import ConfigError, RunConfig
from earl_core.deployment.stages import stage_of
from earl_core.dispatch import Manifest, ManifestError
from earl_core.experience.alike_groups import (
    ENOUGH_SHARE,
    PROMPTS,
    TRAINED_EPISODES,
    JudgedGroups,
    next_wave,
)
from earl_core.experience.group_returns import GroupReturns
from earl_core.experience.probe import of_probe
from earl_core.experience.reward import merge_rewards
from earl_core.rollout import rollout_stats
from earl_core.rollout.mixture import Cursor, Place, learn
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import read_state

_OF_ROWS = re.compile(r"(of/[^/]+/)?rows/")
"""Metrics of `RowDraws`."""


@dataclass(frozen=True)
class Wave:
    """Prompts that are played and sealed together: those of an iteration, or a wave of them.

    first: index in the run of the first one. cursor: where a mixture stands before it. before,
    earlier: how many prompts the iteration has played in earlier waves, and what of them. began:
    the iteration's first prompts, by label.
    """

    first: int
    prompts: int
    cursor: Cursor
    began: Mapping[str, int]
    before: int = 0
    earlier: tuple[RolloutStats, ...] = ()

    def outputs(self, cursor: Cursor) -> dict[str, Any]:
        """Return the outputs from which the next prompts follow. cursor: after these prompts."""
        places = {label: place.model_dump() for label, place in cursor.items()}
        return {"cursor": places, PROMPTS: [self.first, self.first + self.prompts]}


def whole_iteration(run: RunDirectory, iteration: int) -> Wave:
    """Return the prompts of an iteration that go on after those of the last one."""
    asked = run.config.rollout.prompts_per_iteration
    first, cursor = taken_before(run, iteration).prompts, _cursor(run, iteration)
    return Wave(first, asked, cursor, _began(first, cursor))


class Taken(NamedTuple):
    """Prompts that were played, and demonstrations that were imitated; both are counted over the
    run."""

    prompts: int
    demonstrations: int


def taken_before(run: RunDirectory, iteration: int) -> Taken:
    """Count what the iterations before this one take, some of which may not have begun.

    Those that the last STABLE checkpoint covers are counted there, whatever the settings were. All
    that follow have those of now, because what was sealed under another number is done again.
    """
    config, stable = run.config, run.last_stable()
    state = read_state(run.checkpoint_path(stable))["state"] if stable >= 0 else {}
    asked, shown = config.rollout.prompts_per_iteration, config.demonstrations
    before, now = config.played_before(stable + 1), config.played_before(iteration)
    imitated = stable + 1 - before
    prompts = state.get("prompts_trained", before * asked) + (now - before) * asked
    # Checkpoints of older releases do not say it.
    demonstrations = state.get("demonstrations_trained", imitated * shown)
    demonstrations += (iteration - now - imitated) * shown
    waves = config.rollout.filters_groups and iteration > stable + 1
    if waves and not config.imitates(iteration - 1):
        prompts = run.manifest(iteration - 1, "rollout").outputs[PROMPTS][1]
    return Taken(prompts, demonstrations)


def check_numbers(run: RunDirectory) -> None:
    """Raise `ConfigError` where a stream, whose groups have their numbers by their batches, would
    skip or repeat prompts."""
    first, size = run.last_stable() + 1, run.config.rollout.prompts_per_iteration
    if run.config.schedule.streams and taken_before(run, first).prompts != first * size:
        raise ConfigError(
            f"schedule.mode: stream gives groups their numbers by batches of {size}, and the "
            f"{first} iterations before have played {taken_before(run, first).prompts} prompts",
            remedy="put rollout.prompts_per_iteration back, or begin a run with --from",
        )


def follows_seal(config: RunConfig) -> bool:
    """Tell whether the prompts of an iteration follow from the seal of the rollout before it: in a
    mixture, and in waves."""
    return config.rollout.filters_groups or bool(config.environments)


def barrier_share(config: RunConfig) -> float:
    """Return the share of iterations whose rollout no engine begins before all have ended the one
    before: for its prompts, or because the version that it plays is evaluated first."""
    every = config.evaluation.every
    return 1.0 if follows_seal(config) else 1.0 / every if every else 0.0


def wave_after(run: RunDirectory, iteration: int, sealed: Sequence[Manifest]) -> Wave:
    """Return the iteration's next wave. sealed: rollouts and rewards of its earlier ones; `more`
    says whether there is one."""
    rollouts, _ = divided(sealed)
    if not rollouts:
        return whole_iteration(run, iteration)
    last = rollouts[-1].outputs
    cursor = {label: Place.model_validate(place) for label, place in last["cursor"].items()}
    return Wave(
        first=last[PROMPTS][1],
        prompts=more(run.config, sealed),
        cursor=cursor,
        began=whole_iteration(run, iteration).began,
        before=_played(rollouts),
        earlier=tuple(map(_tally, rollouts)),
    )


def _began(first: int, cursor: Cursor) -> dict[str, int]:
    return {label: place.drawn for label, place in cursor.items()} or {"": first}


def more(config: RunConfig, sealed: Sequence[Manifest]) -> int:
    """Return how many prompts the next wave plays; 0: the iteration has what it needs, or may play
    no more."""
    rollouts, rewards = divided(sealed)
    judged, rollout = _judged(rewards), config.rollout
    asked, different = rollout.prompts_per_iteration, len(judged.different)
    return next_wave(asked, _played(rollouts), different, len(rollouts), rollout.most_waves)


def divided(sealed: Sequence[Manifest]) -> tuple[list[Manifest], list[Manifest]]:
    """Divide the manifests of waves into those of rollouts and those of rewards."""
    of = {name: [m for m in sealed if stage_of(m.stage) == name] for name in ("rollout", "reward")}
    return of["rollout"], of["reward"]


def whole_rollout(config: RunConfig, sealed: Sequence[Manifest]) -> dict[str, Any]:
    """Return the result of the rollout stage from the manifests of all waves."""
    rollouts, rewards = divided(sealed)
    judged, size = _judged(rewards), config.rollout.group_size
    asked, played = config.rollout.prompts_per_iteration, _played(rollouts)
    trained = judged.trained(asked if config.rollout.alike_groups == "replace" else played)
    tally = rollout_stats.merge([[_tally(each) for each in rollouts]])
    # Later waves play in place of groups that left.
    later = rollouts[1].outputs[PROMPTS][0] if len(rollouts) > 1 else math.inf
    statistics = rollout_stats.selector_statistics(tally).items()
    metrics = {
        **rollout_stats.rollout_metrics(tally),
        **{f"load/{name}": value for name, value in statistics},
        **_over(rollouts, max, "replicas", "peak_bytes", "reserved_bytes"),
        **_over(rollouts, max, *(n for n in rollouts[0].metrics if n.startswith("probe_"))),
        **_over(rollouts, math.fsum, "replicas_lost", "stage_seconds"),
        **_of_rows(rollouts),
        "waves": float(len(rollouts)),
        "prompts": float(played),
        "groups_different": float(len(judged.different)),
        "groups_alike": float(len(judged.alike)),
        "groups_replaced": float(sum(group >= later for group in trained)),
        "groups_trained": float(len(trained)),
    }
    outputs = {
        "cursor": rollouts[-1].outputs["cursor"],
        PROMPTS: [rollouts[0].outputs[PROMPTS][0], rollouts[-1].outputs[PROMPTS][1]],
        TRAINED_EPISODES: [group * size + member for group in trained for member in range(size)],
    }
    if tally.failures:
        outputs["failures"] = tally.failures
    outputs |= of_probe(each.outputs for each in rollouts)
    shards = [entry for each in rollouts for entry in each.shards]
    return {"shards": shards, "outputs": outputs, "metrics": metrics}


def whole_reward(config: RunConfig, rewards: Sequence[Manifest]) -> dict[str, Any]:
    """Return the result of the reward stage from the manifests of all waves."""
    merged = merge_rewards(rank_results(rewards), config)
    times = _over(rewards, math.fsum, "seconds", "read_seconds", "stage_seconds")
    shards = [entry for each in rewards for entry in each.shards]
    return {**merged, "shards": shards, "metrics": {**merged["metrics"], **times}}


def rank_results(rewards: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return what the ranks have found in each of these waves, without shards."""
    return [each for wave in rewards for each in wave.outputs["ranks"]]


def few_differ(rollout: Mapping[str, float], iteration: int) -> str:
    """Return the warning that most of the prompts teach nothing; empty: they do not. rollout: the
    metrics of all waves."""
    different, alike = rollout["groups_different"], rollout["groups_alike"]
    judged = different + alike
    if different >= ENOUGH_SHARE * judged:
        return ""
    return (
        f"iteration {iteration}: only {different:.0f} of {judged:.0f} groups have rewards that "
        "differ, the others teach nothing: choose prompts that are neither hopeless nor sure for "
        "the policy, or raise rollout.group_size"
    )


def _judged(rewards: Sequence[Manifest]) -> JudgedGroups:
    parts = [JudgedGroups.model_validate(each["groups"]) for each in rank_results(rewards)]
    return JudgedGroups.together(parts)


def _tally(rollout: Manifest) -> RolloutStats:
    return RolloutStats.model_validate(rollout.outputs["tally"])


def _played(rollouts: Sequence[Manifest]) -> int:
    spans = [each.outputs[PROMPTS] for each in rollouts]
    return sum(end - first for first, end in spans)


def _over(waves: Sequence[Manifest], join: Any, *names: str) -> dict[str, float]:
    """Join the metrics of these names over the waves; none that no wave has."""
    found = {name: [each.metrics[name] for each in waves if name in each.metrics] for name in names}
    return {name: float(join(values)) for name, values in found.items() if values}


def _of_rows(waves: Sequence[Manifest]) -> dict[str, float]:
    """Join the metrics of `RowDraws` over the waves, by the episodes that each has of their
    environment."""
    found: dict[str, float] = {}
    for name in sorted({name for each in waves for name in each.metrics if _OF_ROWS.match(name)}):
        episodes = name.partition("rows/")[0] + "episodes"
        those = [each.metrics for each in waves if name in each.metrics]
        weights = [each[episodes] or 1e-9 for each in those]
        told = math.fsum(w * each[name] for w, each in zip(weights, those, strict=True))
        found[name] = told / math.fsum(weights)
    return found


def cursor_after(run: RunDirectory, iteration: int) -> Cursor | None:
    """Return the places that the environments of a mixture have reached after an iteration, as its
    seal has them; None where none has."""
    stages = ("collect", "rollout") if run.config.schedule.streams else ("rollout", "collect")
    for stage in stages:
        if not run.stage_path(iteration, stage).exists():
            continue
        cursor = run.manifest(iteration, stage).outputs.get("cursor")
        if cursor is not None:
            return {label: Place.model_validate(place) for label, place in cursor.items()}
    return None


def _cursor(run: RunDirectory, iteration: int) -> Cursor:
    """Return the places that the environments of a mixture have reached before an iteration. They
    follow the returns of those iterations that have ended when its rollout may begin."""
    if run.config.played_before(iteration) == 0 or not run.config.environments:
        return {}
    cursor = cursor_after(run, iteration - 1)
    if cursor is None:
        raise ManifestError(
            f"iteration {iteration - 1} does not say which prompts it has drawn: resume "
            "from an earlier checkpoint (earl resume --from)"
        )
    return learnt_before(run, cursor, iteration)


def learnt_before(run: RunDirectory, cursor: Cursor, iteration: int) -> Cursor:
    """Return the places with what the curriculum learns for an iteration: of the returns of the
    last one that has ended whenever its episodes may begin."""
    ended = iteration - 1 - run.config.schedule.staleness
    if run.config.curriculum is None or ended < 0:
        return cursor
    returns = run.rewards(ended).get("returns", {})
    rewarded = {label: GroupReturns.model_validate(each) for label, each in returns.items()}
    return learn(cursor, rewarded, run.config.curriculum)

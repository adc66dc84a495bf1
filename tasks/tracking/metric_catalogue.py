"""Catalogue of the numbers of metrics.jsonl: unit, meaning, and name in MLflow.

MLflow draws a section for what stands before a name's last slash, ascending, and in it a chart for
each name, ascending. So the sections are numbered by what people ask first: is it learning, is it
healthy, what is slow, what changed; the names in the first one are chosen to stand in that order.
A number that has no entry is the user's own, of an environment or of a reward function, and goes to
MLflow as it is called.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A number, or a family of them: `*` in `name` stands for a part that `mlflow` repeats.

    name: in metrics.jsonl; an evaluation's begin with `evaluation/`. mlflow: None where MLflow
    does not get it. unit: empty for a pure number.
    """

    name: str
    mlflow: str | None
    unit: str
    description: str


LEARNING, OUTCOMES, HEALTH = "1_learning", "2_outcomes", "3_health"
LENGTHS, SPEED, MEMORY, PLAN = "4_lengths", "5_speed", "6_memory", "7_plan"

_SHOWN: tuple[tuple[str, str | None, str, str], ...] = (
    # Is it learning? The first screen.
    ("rollout/return/mean", f"{LEARNING}/return", "", "Mean return of the episodes played"),
    ("evaluation/return/mean", f"{LEARNING}/return_held_out", "",
     "Mean return of the held-out episodes; its step counts finished iterations"),
    ("reward/mean", f"{LEARNING}/reward", "",
     "Mean reward trained on: the weighed return and what reward functions add"),
    ("rollout/context/mean", f"{LEARNING}/tokens_per_episode", "tokens",
     "Mean length of an episode, observations included"),
    ("rollout/tokens_per_second", f"{LEARNING}/tokens_per_second", "tokens/s",
     "Tokens sampled in the rollout, all engines together"),
    ("rollout/turns/mean", f"{LEARNING}/turns_per_episode", "turns", "Mean turns of an episode"),
    ("rollout/outcome/win", f"{LEARNING}/win_rate", "share", "Share of episodes won"),
    ("evaluation/outcome/win/share", f"{LEARNING}/win_rate_held_out", "share",
     "Share of held-out episodes won"),
    # How do episodes end?
    ("rollout/outcome/*", f"{OUTCOMES}/*", "share", "Share of episodes with this outcome"),
    ("rollout/finish/*", f"{OUTCOMES}/ended_*", "share",
     "Share of episodes that ended for this reason; done: the environment ended it"),
    # Is it healthy?
    ("update/entropy", f"{HEALTH}/entropy", "nats", "Mean entropy of the sampled tokens"),
    ("update/grad_norm", f"{HEALTH}/gradient_norm", "", "Norm of the gradient before clipping"),
    ("update/loss", f"{HEALTH}/loss", "", "What the optimizer minimises"),
    ("update/loss/*", f"{HEALTH}/loss_*", "", "A part of the loss, where it has several"),
    ("update/learning_rate", f"{HEALTH}/learning_rate", "", "Of the optimizer"),
    ("update/clip_fraction", f"{HEALTH}/clipped_share", "share",
     "Share of trained tokens that the policy loss clips, bounds or masks"),
    ("update/ratio_max", f"{HEALTH}/ratio_max", "",
     "Largest ratio of a token's probability to the one before the update"),
    ("update/update_kl", f"{HEALTH}/kl_of_update", "nats",
     "How far the update moved the policy, by tokens"),
    ("update/reference_kl", f"{HEALTH}/kl_to_reference", "nats",
     "How far the policy is from the initial one"),
    ("update/mismatch_mean", f"{HEALTH}/mismatch_mean", "nats",
     "Mean difference of a token's log-prob between engine and trainer"),
    ("update/mismatch_max", f"{HEALTH}/mismatch_max", "nats", "The largest such difference"),
    ("update/mismatch_kl", f"{HEALTH}/mismatch_kl", "nats", "KL(engine || trainer), estimated"),
    ("update/routing_changed_share", f"{HEALTH}/routing_changed_share", "share",
     "Share of recorded experts that the live routers would not have chosen, mean of the layers"),
    ("update/routing_changed_share_max", f"{HEALTH}/routing_changed_share_max", "share",
     "The largest such share of a layer"),
    ("update/expert_load", f"{HEALTH}/expert_load", "",
     "Tokens of the busiest expert over those of the mean one, mean of the layers"),
    ("update/expert_load_max", f"{HEALTH}/expert_load_max", "",
     "The largest such load of a layer"),
    ("update/router_aux_loss", f"{HEALTH}/router_aux_loss", "",
     "Loss that balances experts, before its coefficient: the experts of a token where even"),
    ("rollout/probe_mismatch_mean", f"{HEALTH}/probe_mismatch_mean", "nats",
     "The same of the likeliest token after beginnings of episodes, before any is played"),
    ("rollout/probe_mismatch_max", f"{HEALTH}/probe_mismatch_max", "nats",
     "The largest such difference"),
    ("rollout/probe_other_share", f"{HEALTH}/probe_other_share", "share",
     "Share of these beginnings after which engine and trainer hold another token the likeliest"),
    ("update/importance_weight_mean", f"{HEALTH}/importance_weight", "",
     "Mean weight of the importance correction"),
    ("update/importance_sample_share", f"{HEALTH}/effective_samples", "share",
     "Effective sample size over the tokens: how much the importance weights differ"),
    ("update/importance_episode_share", f"{HEALTH}/effective_episodes", "share",
     "The same over the episodes, by the mean weights of their tokens"),
    ("update/importance_masked_share", f"{HEALTH}/masked_share", "share",
     "Share of trained tokens of importance weight 0"),
    ("update/age_mean", f"{HEALTH}/age", "versions",
     "Policy versions between the one that sampled a trained token and the one that trains on it"),
    ("update/age_p95", f"{HEALTH}/age_p95", "versions", "The 95th percentile of that"),
    ("update/age_max", f"{HEALTH}/age_max", "versions", "The largest"),
    ("rollout/replayed_share", f"{HEALTH}/replayed_share", "share",
     "Share of the trained groups that were trained before (schedule.replay)"),
    ("rollout/replayed_age_mean", f"{HEALTH}/replayed_age", "versions",
     "Age of these groups, each by its oldest token"),
    ("rollout/replayed_age_max", f"{HEALTH}/replayed_age_max", "versions", "The largest"),
    ("advantage/nonzero_share", f"{HEALTH}/trained_share", "share",
     "Share of sampled tokens with an advantage: what there is to learn from"),
    ("advantage/kl_bounded_share", f"{HEALTH}/kl_bounded_share", "share",
     "Share of tokens that pay the KL estimator's bound"),
    ("advantage/anchored_share", f"{HEALTH}/anchored_share", "share",
     "With gigpo: share of turns whose observation another turn of the group answered too"),
    ("advantage/groups_dropped", f"{HEALTH}/groups_dropped", "groups",
     "Groups with fewer than two episodes left"),
    ("critic/explained_variance", f"{HEALTH}/explained_variance", "",
     "Share of the variance of returns that the critic's values explain, before it is trained on "
     "them: 1 all, 0 none, below 0 worse than their mean; none where all returns are equal"),
    ("critic/loss", f"{HEALTH}/value_loss", "", "The critic's loss, in reward units squared"),
    ("critic/clip_fraction", f"{HEALTH}/value_clipped_share", "share",
     "Share of time steps whose value the critic's loss moves no further"),
    ("critic/grad_norm", f"{HEALTH}/value_gradient_norm", "",
     "Norm of the critic's gradient before clipping"),
    ("critic/value_mean", f"{HEALTH}/value", "", "Mean value of the time steps"),
    ("critic/return_mean", f"{HEALTH}/value_target", "",
     "Mean return of the time steps, towards which values are moved"),
    ("rollout/groups_alike", f"{HEALTH}/groups_alike", "groups",
     "Groups whose episodes all have the same reward, which have left the batch"),
    ("rollout/groups_replaced", f"{HEALTH}/groups_replaced", "groups",
     "Groups trained on that were played in place of such ones"),
    ("rollout/groups_trained", f"{HEALTH}/groups_trained", "groups",
     "Groups trained on, where those that score alike leave the batch"),
    ("rollout/rows/known_share", f"{HEALTH}/rows_known", "share",
     "With a curriculum over rows: share of the rows that it knows something of"),
    ("rollout/rows/expected_success", f"{HEALTH}/rows_expected_success", "share",
     "Success that it expected at the rows that it chose, before they were played"),
    ("rollout/episodes", f"{HEALTH}/episodes", "episodes", "Episodes played to their end"),
    ("advantage/episodes_failed", f"{HEALTH}/episodes_failed", "episodes",
     "Episodes that failed, or could not be scored"),
    ("rollout/episodes_retried", f"{HEALTH}/episodes_retried", "episodes",
     "Episodes played again, because an environment host was lost"),
    ("rollout/return/std", f"{HEALTH}/return_deviation", "",
     "Standard deviation of the returns: 0 leaves nothing to compare"),
    ("rollout/tool_errors", f"{HEALTH}/tool_errors", "calls", "Tool calls that failed"),
    ("rollout/calls_timed_out", f"{HEALTH}/calls_timed_out", "calls",
     "Calls of agents that waited too long for an answer"),
    ("rollout/answers_from_elsewhere", f"{HEALTH}/answers_from_elsewhere", "calls",
     "Calls after an answer that the agent never asked for, and another episode did: its client "
     "caches answers"),
    ("rollout/constrained_calls", f"{HEALTH}/constrained_calls", "calls",
     "Calls that asked for an answer of a form (a tool call, JSON, a schema)"),
    ("rollout/constrained_satisfied_share", f"{HEALTH}/constrained_satisfied_share", "",
     "Of these calls, the share whose answers had the form"),
    ("rollout/groups_anew", f"{HEALTH}/groups_anew", "groups",
     "Groups to be played anew: their engine was lost with its process, or they could not be used"),
    ("rollout/groups_resumed", f"{HEALTH}/groups_resumed", "groups",
     "Groups that went on where a stop or a lost engine had left them (schedule.mode stream)"),
    ("rollout/replicas_lost", f"{HEALTH}/engines_lost", "engines", "Engines that died"),
    ("recovery/stages_repeated", f"{HEALTH}/stages_repeated", "stages",
     "Stages repeated, because ranks died or missed a deadline"),
    ("recovery/without_step", f"{HEALTH}/without_step", "",
     "1 for an iteration that had nothing to train on: no group had two episodes left, or, where "
     "those that score alike leave, none with rewards that differ"),
    ("recovery/groups_rebuilt", f"{HEALTH}/groups_rebuilt", "groups",
     "Worker groups that died between two calls, and were built again"),
    # How long are episodes?
    ("rollout/context/max", f"{LENGTHS}/longest_episode", "tokens", "The longest episode"),
    ("rollout/context/p95", f"{LENGTHS}/episode_p95", "tokens", "95 % are no longer"),
    ("rollout/tokens_per_turn", f"{LENGTHS}/tokens_per_answer", "tokens", "Mean of an answer"),
    ("rollout/samples_per_episode", f"{LENGTHS}/samples_per_episode", "samples",
     "Token streams of an episode: above 1 where a conversation does not go on"),
    # What is slow?
    ("*/stage_seconds", f"{SPEED}/seconds_*", "s", "What a stage took, seen by the flow"),
    ("update/tokens_per_second", f"{SPEED}/tokens_per_second_update", "tokens/s",
     "Tokens that the update computed, all ranks together"),
    ("update/skipped_tokens_share", f"{SPEED}/skipped_tokens_share", "share",
     "Share of the update's tokens in samples without advantage, which it did not compute"),
    ("rollout/groups_carried", f"{SPEED}/groups_carried", "groups",
     "Groups that an earlier iteration has begun and not finished (schedule.mode stream)"),
    ("rollout/waves", f"{SPEED}/waves", "waves", "Waves of prompts that the rollout has played"),
    ("rollout/tokens_per_pass", f"{SPEED}/tokens_per_pass", "tokens",
     "Tokens of a sequence that a forward pass yields, drafts included (rollout.drafts)"),
    ("rollout/draft_accepted_share", f"{SPEED}/draft_accepted_share", "share",
     "Share of draft tokens that were right (rollout.drafts)"),
    ("rollout/environment_share", f"{SPEED}/environment_share", "share",
     "Share of the rollout in which episodes wait for environments and tools"),
    ("rollout/tool_calls", f"{SPEED}/tool_calls", "calls", "Tool calls"),
    ("rollout/tool_seconds", f"{SPEED}/tool_seconds", "s", "Seconds of the rollout spent on tools"),
    ("rollout/load/running_requests_mean", f"{SPEED}/requests_running", "requests",
     "Requests that an engine works on, mean"),
    ("update/shared_prefix_share", f"{SPEED}/shared_prefix_share", "share",
     "Share of the update's tokens that are computed once for several samples"),
    ("update/imbalance", f"{SPEED}/imbalance", "share",
     "How much more than the mean the most loaded update rank has"),
    ("update/routing_bytes", f"{SPEED}/bytes_of_routing", "bytes",
     "What the update's ranks read of recorded experts, each token's at every pass"),
    ("update/remote_bytes", f"{SPEED}/bytes_from_other_hosts", "bytes",
     "What the update read from other hosts"),
    # Does it fit?
    ("*/peak_bytes", f"{MEMORY}/peak_*", "bytes", "Peak of the stage's private memory"),
    ("*/peak_cuda_bytes", f"{MEMORY}/peak_gpu_*", "bytes", "Peak of the stage on a GPU"),
    ("dispatch/shared_memory_bytes", f"{MEMORY}/shared_memory", "bytes",
     "The run's shards and weights in shared memory"),
    ("dispatch/spill_lag_bytes", f"{MEMORY}/spill_lag", "bytes",
     "What a crash of the machine would cost right now"),
    ("rollout/load/live_tokens_max", f"{MEMORY}/live_tokens", "tokens",
     "The most tokens that an engine holds at once"),
    # What changed?
    ("selector/switches", f"{PLAN}/switches", "stages", "Stages whose deployment changed"),
    ("selector/*/predicted_over_measured_seconds", f"{PLAN}/*_seconds_predicted_over_measured", "",
     "1 is exact, above 1 was too careful"),
    ("selector/*/predicted_over_measured_peak_bytes", f"{PLAN}/*_peak_predicted_over_measured", "",
     "1 is exact, above 1 was too careful"),
    ("selector/*/replicas", f"{PLAN}/*_replicas", "replicas", "Of the stage deployment"),
    ("selector/*/tensor_parallel", f"{PLAN}/*_tensor_parallel", "ranks", "Ranks of a replica"),
    ("selector/*/max_model_len", f"{PLAN}/*_max_model_len", "tokens",
     "The longest context that the engines are built for"),
    ("selector/*/max_tokens_per_microbatch", f"{PLAN}/*_tokens_per_microbatch", "tokens",
     "The most tokens that are computed together"),
    # Held-out episodes and suites; the table `evaluation/results.json` has the intervals.
    ("evaluation/outcome/*/share", "evaluation/*", "share",
     "Share of held-out episodes with this outcome"),
    ("evaluation/suite/*/return", "evaluation/*/return", "", "Mean return of a suite"),
    ("evaluation/suite/*/pass_at_*/low", None, "share", "Lower end of the 95 % interval"),
    ("evaluation/suite/*/pass_at_*/high", None, "share", "Upper end of the 95 % interval"),
    ("evaluation/suite/*/pass_at_*", "evaluation/*/pass_at_*", "share",
     "Share of a suite's prompts that pass in so many attempts"),
    # What the guard found.
    ("guard/findings", "guard/findings", "", "Findings of the guard in the iteration"),
    ("guard/quarantined", "guard/quarantined", "episodes",
     "Episodes that left their groups because of what they were paid"),
    ("guard/cautious", "guard/cautious", "",
     "How many times the update has the lower learning rate and the higher KL coefficient"),
    ("guard/of/*", None, "", "What a source of rewards gave, but for what lies outside: mean, its "
     "standard error by groups, standard deviation, least and greatest, groups"),
    ("guard/*", "guard/*", "", "1 in iterations with this finding"),
    # The user's own.
    ("rollout/environment/*", "environment/*", "", "What the environment measured"),
    ("rollout/of/*", "environments/*", "", "One environment of several"),
    ("reward/of/*", "reward/*", "", "One reward function"),
    ("reward/of_role/*", "reward/of_role/*", "",
     "Returns of one role's parts of episodes, with what all roles share"),
    # The machine, from system.jsonl.
    ("system/cpu", "system/cpu", "%", "Load of all cores of the machine"),
    ("system/memory", "system/memory", "bytes", "In use, within the limit of the control group"),
    ("system/memory_of_run", "system/memory_of_run", "bytes",
     "Private memory of the run's processes on this machine"),
    ("system/disk_free", "system/disk_free", "bytes", "Free where the run directory lies"),
    ("system/gpu_*_load", "system/gpu_*_load", "%", "Load of a GPU of this machine"),
    ("system/gpu_*_memory", "system/gpu_*_memory", "bytes", "In use on a GPU of this machine"),
    ("system/gpu_*_power", "system/gpu_*_power", "W", "Drawn by a GPU of this machine"),
)  # fmt: skip

_KEPT = (
    ("evaluation/*", "", "As of the rollout; intervals `low` and `high` are 95 %"),
    ("reward/*", "", "Spread of the reward, and the stage's own seconds"),
    ("advantage/*", "", "Moments of the advantages, and the stage's own seconds"),
    ("reference/*", "", "The reference stage's own seconds and memory"),
    ("value/*", "", "The value stage's own seconds and memory"),
    ("critic/*", "", "Counts, seconds and memory of the critic's update"),
    ("rollout/context_by_turn/*", "tokens", "Mean tokens that stand after so many turns"),
    ("rollout/generated_share", "share", "Share of an episode's tokens that the policy wrote"),
    ("rollout/*", "", "Counts, seconds and memory of the rollout"),
    ("demonstrate/epochs", "", "Passes over the demonstrations so far"),
    ("demonstrate/*", "", "Counts, lengths and seconds of the demonstrations"),
    ("update/*", "", "Counts, seconds and memory of the update; the mismatch's percentiles"),
    ("publish/*", "", "The weights published"),
    ("select/*", "", "The choice of the plan"),
    ("dispatch/*", "bytes", "Bytes between the stages"),
    ("selector/attempts", "", "Choices made for the iteration"),
    ("selector/*", "", "The plan's stage deployments and predictions (docs/selector.md)"),
)

CATALOGUE = (
    *(Metric(*each) for each in _SHOWN),
    *(Metric(name, None, unit, description) for name, unit, description in _KEPT),
)
"""The first entry that fits a name counts."""


_BAD_NAME = re.compile(r"[^\w/. :-]")
_LONGEST_NAME = 250


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", "(.+?)"))


_PATTERNS = tuple((_pattern(metric.name), metric) for metric in CATALOGUE)


@lru_cache(maxsize=4096)
def entry_of(name: str) -> tuple[Metric, str | None] | None:
    """The entry of a name of metrics.jsonl and the name in MLflow; None: it is the user's own."""
    for pattern, metric in _PATTERNS:
        if found := pattern.fullmatch(name):
            shown = metric.mlflow
            for part in found.groups():
                shown = shown and shown.replace("*", part, 1)
            return metric, shown
    return None


def mlflow_name(name: str) -> str | None:
    """The number's name in MLflow; None where MLflow does not get it."""
    found = entry_of(name)
    return name if found is None else found[1]


def stored_name(name: str) -> str:
    """A name that MLflow takes. A changed one ends with a mark, so that two never become one."""
    # One name that MLflow refuses costs all metrics of its step, and it wants a path in its
    # shortest form.
    parts = _BAD_NAME.sub("_", name).split("/")
    stored = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if stored == name and len(name) <= _LONGEST_NAME:
        return name
    mark = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:6]
    return f"{stored[: _LONGEST_NAME - len(mark) - 1].rstrip('/')}.{mark}"


def for_mlflow(row: Mapping[str, Any], *, scored: bool) -> dict[str, Any]:
    """The numbers of a row that MLflow gets, by their names there. scored: whether the reward is
    another number than the return."""
    numbers = {}
    for name, value in row.items():
        shown = mlflow_name(name)
        if shown is not None and _is_number(value) and (scored or name != "reward/mean"):
            # An outcome may be called as another number is there.
            numbers[shown if shown not in numbers else name] = value
    return numbers


def described(names: set[str]) -> list[dict[str, str]]:
    """A table of what the numbers of these names, those of metrics.jsonl, are in MLflow."""
    rows = []
    for name in names:
        found = entry_of(name)
        shown = mlflow_name(name)
        if shown is not None:
            unit, description = found[0][2:] if found else ("", "The user's own")
            rows.append(
                {
                    "metric": stored_name(shown),
                    "unit": unit,
                    "description": description,
                    "in metrics.jsonl": name,
                }
            )
    return sorted(rows, key=lambda row: row["metric"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

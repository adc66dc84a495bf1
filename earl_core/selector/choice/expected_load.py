"""Expected load of the next iterations on the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from earl_core.selector.choice.selection import WINDOW, SelectionInput, Statistics, forecast
from earl_core.selector.model.roofline import Load

GENERATED_SHARE = 0.5
"""Part of an episode's tokens that the model writes, until a rollout was seen."""

_UNKNOWN_TURN = 512


def loads(given: SelectionInput) -> tuple[Load, Load]:
    """The load expected of the next iteration, and that at the end of the forecast, when samples
    may be as long again as any of the last iterations."""
    seen, settings = given.statistics, given.selector
    limit = float(given.model.max_positions)
    if seen.context_mean:
        mean, longest = list(seen.context_mean), list(seen.context_max or seen.context_mean)
    else:
        turn = given.rollout.max_tokens_per_turn or _UNKNOWN_TURN
        # What the engines are first built for says more than limits that nobody means to reach.
        built = float(given.rollout.max_model_len or limit)
        mean = longest = [min(limit, built, float(given.rollout.max_turns * turn))]

    def at(steps: int) -> Load:
        context = min(limit, forecast(mean, steps, settings.hysteresis))
        share = seen.generated_share[-1] if seen.generated_share else GENERATED_SHARE
        return Load(
            episodes=given.rollout.episodes_per_iteration,
            context=max(1.0, context),
            longest=max(1.0, context, min(limit, forecast(longest, steps, settings.hysteresis))),
            generated=max(1.0, context * share),
            turns=seen.turns_mean[-1] if seen.turns_mean else float(given.rollout.max_turns),
            tool_wait=seen.tool_wait_seconds[-1] if seen.tool_wait_seconds else 0.0,
            in_play=in_play(given),
        )

    ahead = at(1 + settings.forecast)
    return at(1), ahead._replace(longest=max(ahead.longest, min(limit, max(longest[-WINDOW:]))))


def in_play(given: SelectionInput) -> int:
    """Episodes that engines of a stream are given at a time, at most; 0 where there is none."""
    episodes = given.rollout.episodes_per_iteration
    return (given.staleness + 1) * episodes if given.streams else 0


def trained_load(given: SelectionInput, stage: str, load: Load) -> Load:
    """Return the load on a stage of a rollout's load: groups that are trained again are on those
    that train and score, too."""
    if stage == "rollout" or not given.groups_replayed:
        return load
    again = given.groups_replayed / given.rollout.prompts_per_iteration
    return load._replace(episodes=round(load.episodes * (1 + again)))


def computed_load(
    seen: Statistics, stage: str, load: Load, of: Callable[[Sequence[float]], float]
) -> Load:
    """Return the part of a load that the update computes, where the last iterations left a part
    out; for other stages all of it. of: makes one share of theirs, such as `min`."""
    if stage != "update" or not seen.left_out_share:
        return load
    episodes = (1.0 - of(seen.left_out_share)) * load.episodes
    return load._replace(episodes=max(1, round(episodes)))

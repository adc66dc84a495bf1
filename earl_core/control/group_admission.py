"""Which groups of a stream an engine may begin: the bound on their age, and even parts."""

from __future__ import annotations

from collections.abc import Collection

from earl_core.config import RunConfig
from earl_core.control.streamed_engine import StreamedEngine
from earl_core.run.group_batches import GroupBatches


def admitted(
    config: RunConfig,
    batches: GroupBatches,
    engines: Collection[StreamedEngine],
    engine: StreamedEngine,
    first: int,
    until: int,
) -> list[int]:
    """The next groups that the engine may begin, in order.

    Those below (v + staleness + 1) * B under version v, so that no token is older than that when
    its batch is trained. Engines have even parts of what there is to play. first, until: the groups
    that there are to play.
    """
    rollout, version = config.rollout, engine.version or 0
    size = rollout.group_size
    ahead = version + config.schedule.staleness + 1
    bound = min(ahead * rollout.prompts_per_iteration, until)
    playing = set().union(*(each.playing for each in engines))
    open_ = [g for g in range(first, bound) if g not in playing and g not in batches]
    part = -(-(len(open_) + len(playing)) // len(engines))
    chosen: list[int] = []
    room = engine.room
    for group in open_:
        fits = room >= size or not (engine.playing or chosen)
        if not fits or len(engine.playing) + len(chosen) >= part:
            break
        chosen.append(group)
        room -= size
    return chosen

"""A run's need of shared memory on its hosts, and the check against their room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.config.schedule import ReplayConfig
from earl_core.pretrained.adapter_checks import pairs_bytes
from earl_core.pretrained.model_directory import published_bytes, read_model_shape, stored_routing
from earl_core.selector.model.memory_model import gib
from earl_core.system.finding import Finding
from earl_core.system.shared_memory import Need, Room, enlarge, shards_limit

_SAMPLED_BYTES = 9
"""Bytes of a token in the shards of the rollout; see `trajectory.schema`."""
_MORE_BYTES = 4
"""Bytes of a token in a further column: advantages, reference or old log-probs, or versions."""
_TOKEN_BYTES = _SAMPLED_BYTES + _MORE_BYTES
"""Bytes of a token in the shards of rollout and advantage."""


def samples_bytes(episodes: int, tokens: int, columns: int = 0, routing: int = 0) -> int:
    """Return the bytes of so many episodes of so many tokens. columns: further ones. routing: bytes
    of a token's (`routing_bytes`)."""
    return episodes * tokens * (_TOKEN_BYTES + columns * _MORE_BYTES + routing)


def routing_bytes(config: RunConfig) -> int:
    """Return the bytes of a token's recorded experts and their hash, at most; 0 where nothing is
    recorded."""
    if config.rollout.record_routing == "off":
        return 0
    routing = stored_routing(Path(config.initial_model.path))
    return 0 if routing is None else routing.stored_bytes


def need_of(config: RunConfig) -> Need:
    """Compute the bytes that the run keeps, should every episode fill the context that engines are
    first built for.

    Raises `ConfigError` for a model that is not there.
    """
    model, rollout = Path(config.initial_model.path), config.rollout
    positions = read_model_shape(model).max_positions
    further = (config.needs_reference, config.critic is not None, config.needs_old_logprobs)
    columns = sum((*further, config.schedule.streams))
    tokens = min(rollout.max_model_len or positions, positions)
    episodes = rollout.episodes_per_iteration * rollout.most_waves
    routing = routing_bytes(config)
    samples = samples_bytes(episodes, tokens, columns, routing)
    # Shards of stale rollouts wait for their updates.
    kept = samples * (config.checkpoint.every + config.schedule.staleness)
    if config.schedule.replay is not None:
        kept += _replayed_bytes(config, config.schedule.replay, tokens, routing)
    return Need(version_bytes(config), kept, config.schedule.versions)


def version_bytes(config: RunConfig) -> int:
    """Return the bytes of a published version of the weights, or of the adapter's pairs. Raises
    `ConfigError` for a model that is not there."""
    model, dtype = config.initial_model, config.rollout.dtype
    if model.adapter is not None:
        return pairs_bytes(model, dtype)
    return published_bytes(Path(model.path), dtype)


def _replayed_bytes(config: RunConfig, replay: ReplayConfig, tokens: int, routing: int) -> int:
    """Return the bytes that the run keeps because groups are trained again: what engines have
    sampled, and the new columns of such groups until a checkpoint covers them."""
    size, prompts = config.rollout.group_size, config.rollout.prompts_per_iteration
    scores = sum((config.needs_reference, config.critic is not None, config.needs_old_logprobs))
    sampled = prompts * size * tokens * (_SAMPLED_BYTES + _MORE_BYTES + routing)
    again = replay.groups(prompts) * size * tokens * _MORE_BYTES * (1 + scores)
    return sampled * replay.max_age + again * config.checkpoint.every


def judged_room(need: Need, room: Room, max_bytes: int | None) -> Iterator[Finding]:
    """Yield the findings against a run that needs so much where weights have so much room.
    max_bytes: `dispatch.max_bytes`."""
    larger = enlarge(need.size)
    limit = shards_limit(max_bytes, room.size, need.weights)
    weights = f"{need.versions} x {gib(need.version)}"
    if need.weights > room.free:
        text = f"{need.counted} of the model's weights must fit, {weights}: {room}"
        yield Finding("blocks", text, f"free some with `earl shards sweep`, or {larger}")
    elif max_bytes is not None and need.weights + max_bytes > room.size:
        text = (
            f"dispatch.max_bytes is {gib(max_bytes)}, and {need.counted} of the weights need "
            f"{weights} beside it, but {room.place} has {gib(room.size)} in all"
        )
        yield Finding(
            "blocks", text, f"lower it, or leave it out: it follows the size; or {larger}"
        )
    elif need.samples > limit:
        text = (
            f"shards may have {gib(limit)} beside the weights ({weights}) in {room.place}; should "
            f"every episode fill its context they need {gib(need.samples)}"
        )
        yield Finding("warning", text, larger)

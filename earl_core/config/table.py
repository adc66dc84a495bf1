"""The resolved sizes of a run as one table, printed at the start."""

from __future__ import annotations

from earl_core.config.run import RunConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.stages import STAGES
from earl_core.system.plural import plural
from earl_core.system.shared_memory import room_in


def resolved_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Rows of (what, value, where it comes from) for everything derived from the sizes."""
    rollout, update = config.rollout, config.update
    episodes = rollout.episodes_per_iteration
    playing = config.played_before(config.iterations)
    steps = update.epochs * update.minibatches
    per_step = rollout.prompts_per_iteration / update.minibatches
    turn = rollout.max_tokens_per_turn
    return [
        ("run directory", f"{config.runs_directory}/{config.name}", "runs_directory, name"),
        ("model", config.model.shown, "model.from" if config.model.ancestor else "model.path"),
        *_played_rows(config),
        (
            "engine",
            f"{rollout.engine}, {_precision(rollout.dtype)}",
            "rollout.engine, rollout.dtype",
        ),
        ("iterations", str(config.iterations), "iterations"),
        (
            "episodes per iteration",
            str(episodes),
            f"{rollout.prompts_per_iteration} prompts x group of {rollout.group_size}",
        ),
        *_group_rows(config),
        ("answers per iteration, at most", str(episodes * rollout.max_turns), "x max_turns"),
        (
            "tokens per answer, at most",
            "the model's context" if turn is None else str(turn),
            "rollout.max_tokens_per_turn",
        ),
        ("optimizer steps per iteration", str(steps), "update.epochs x update.minibatches"),
        ("prompts per optimizer step", f"{per_step:g}", "prompts_per_iteration / minibatches"),
        (
            "tokens per microbatch, at most",
            str(update.max_tokens_per_microbatch or _microbatch(update)),
            "update.max_tokens_per_microbatch",
        ),
        ("episodes in all", str(episodes * playing), "x iterations"),
        *_imitation_rows(config),
        *_stage_rows(config),
        *_reward_rows(config),
        ("precision of the update", _precision(update.precision), "update.precision"),
        ("advantage", str(config.algorithm.advantage["name"]), "algorithm.advantage"),
        ("policy loss", str(config.algorithm.policy_loss["name"]), "algorithm.policy_loss"),
        ("checkpoint every", plural(config.checkpoint.every, "iteration"), "checkpoint.every"),
        ("shared memory", str(room_in(config.dispatch.directory)), "dispatch.directory"),
    ]


def _group_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """What becomes of groups that score alike, where they leave the batch."""
    rollout = config.rollout
    if not rollout.filters_groups:
        return []
    does = f"{rollout.alike_groups}, {plural(rollout.most_waves, 'wave')} of prompts at most"
    return [("groups that score alike", does, "rollout.alike_groups, rollout.max_waves")]


def _precision(name: str) -> str:
    return "bf16 if all devices compute it fast, else float32" if name == "auto" else name


def _microbatch(update: UpdateConfig) -> str:
    on_gpu, without = map(update.tokens_per_microbatch, (True, False))
    return f"{on_gpu} if a GPU's memory holds them, {without} without a GPU"


def _played_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    if config.environment is not None:
        return [("environment", config.environment.played, "environment.name")]
    whole = sum(each.weight for each in config.environments)
    return [
        (f"environment {each.title}", f"{each.weight / whole:.0%} of the prompts", "environments")
        for each in config.environments
    ]


def _imitation_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    if config.imitation is None:
        return []
    text = f"{config.imitation.iterations}, of {config.demonstrations} demonstrations"
    return [("iterations that imitate", text, "imitation")]


def _reward_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    functions, own = config.reward.functions, config.reward.environment_weight
    parts = [("the environment's", own), *((each.title, each.weight) for each in functions)]
    text = ", ".join(f"{weight:g} x {title}" for title, weight in parts)
    return [("reward", text, "reward")] if functions or own != 1 else []


_OPEN = "all GPUs, or one rank without any"


def _stage_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """List the rows that tell who lays the stages out: the configuration, or a policy."""
    stages, moved = config.stages, config.selector.moves
    rows = [
        (f"stage deployment of the {stage}", given.label if given else _OPEN, f"stages.{stage}")
        for stage, given in zip(("rollout", "update"), stages.at(0), strict=True)
        if stage not in moved
    ]
    for change in stages.changes:
        named = [each.deployment for each in (change.rollout, change.update) if each is not None]
        text = "; ".join(f"{each.stage} {each.label}" for each in named)
        rows.append((f"from iteration {change.iteration} on", text, "stages.changes"))
    division = "as the selector chooses" if config.divides else stages.division.placement
    rows.append(("devices of the two", division, "stages.placement"))
    if config.selector.policy == "auto":
        rows.append(("who lays the stages out", "auto: decided at the start", "selector.policy"))
    if moved:
        runs = [each for each in moved if STAGES[each].takes_part(config)]
        where = f"stage deployment of {', '.join(runs)}"
        rows.append((where, config.selector.policy, "selector.policy"))
    return rows

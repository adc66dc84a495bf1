"""The stages of an iteration, and who does their work: the one table of both.

All that has to know which stages there are reads it: the graph of an iteration, worker groups,
placement, the selector, rehearsals, status and reports. A further stage is an entry here, beside
the task that does it (`tasks.stage_tasks`). Imports no torch, and nothing of EARL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args


@dataclass(frozen=True)
class Role:
    """The properties that worker groups of one kind share.

    target: the import path of what runs in their ranks. placed: whose part of a host's devices they
    have, the engines' or the training's; empty: they are too light to matter. release, restore: the
    methods of those that have a place by which they give their devices' memory back and take it
    again. prepare: the one that does ahead of need what is no part of being built.
    """

    name: str
    target: str
    placed: Literal["", "engines", "training"] = ""
    release: str = ""
    restore: str = ""
    prepare: str = ""


def _with_a_model(name: str, target: str) -> Role:
    return Role(name, f"earl_core.learner.{target}", "training", "offload", "reload")


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            "rollout",
            "earl_core.rollout.rollout_worker:RolloutWorker",
            placed="engines",
            release="release_memory",
            restore="restore_memory",
            prepare="prepare",
        ),
        Role("demonstrations", "earl_core.imitation.demonstration_worker:DemonstrationWorker"),
        Role("experience", "earl_core.experience.experience_worker:ExperienceWorker"),
        _with_a_model("reference", "model_worker:ReferenceWorker"),
        _with_a_model("update", "update_worker:LearnerWorker"),
        _with_a_model("critic", "critic_worker:CriticWorker"),
        Role("model", "earl_core.models.builder:ModelBuilder"),
        Role("environment", "earl_core.environments.hosting.check:Check"),
    )
}
"""Every kind of worker group by its name."""

PLACED = tuple(role.name for role in ROLES.values() if role.placed)
"""Roles that have a place."""

TRAINING = tuple(role.name for role in ROLES.values() if role.placed == "training")
"""Roles with a place that hold a model of the learner's."""

Selectable = Literal["rollout", "reference", "critic", "update"]
"""A stage whose deployment is a choice."""

SELECTABLE: tuple[str, ...] = (*get_args(Selectable), "value")
"""Stages that are laid out, measured and predicted: `value` always in the critic's ranks."""

WEIGHTS = "weights"
"""Among what a stage reads: the published weights that its iteration starts from."""


@dataclass(frozen=True)
class Stage:
    """One stage or step of an iteration.

    role: whose worker groups do it, and which entry of the plan lays them out; empty: nobody's.
    reads: the stages whose data it reads, in the order that its key covers, and `WEIGHTS`.
    settings: those of the run file that its result depends on, which its key covers too. makes:
    what its seal stands for: a plan, columns of shards, the learner's state, published weights.
    optional: the attribute, dotted, of a configuration, and of the selection's input where the
    stage is selectable, that says whether it takes part; empty: it always does. scores: it is a
    forward pass of the update's model alone, laid out as the update is unless the choice is its
    own. joins: the attribute of a configuration, and of the selection's input, that says whether
    the ranks of the update do it, which hold its model then; empty: they never do. learnt_by: the
    stage whose result of the iteration before it computes with, and its key covers; empty: none.
    imitates, streams: whether it is of iterations that imitate, or of runs whose groups are sealed
    one by one; None: of both. told_as: the stage under whose name its metrics are told; empty: its
    own.
    """

    name: str
    role: str = ""
    reads: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    makes: Literal["plan", "columns", "state", "weights"] = "columns"
    optional: str = ""
    scores: bool = False
    joins: str = ""
    learnt_by: str = ""
    imitates: bool | None = None
    streams: bool | None = None
    told_as: str = ""

    def done_by(self, config: Any) -> str:
        """The role whose worker groups do the stage in a run of this configuration."""
        joined = self.joins and attrgetter(self.joins)(config)
        return "update" if joined else self.role

    def takes_part(self, given: Any, imitates: bool = False) -> bool:
        """True when an iteration of this configuration, or for this selection's input, has the
        stage. imitates: whether it is an iteration that does."""
        if self.imitates not in (None, imitates):
            return False
        return not self.optional or bool(attrgetter(self.optional)(given))

    def sources(self, given: Any, imitates: bool = False) -> tuple[str, ...]:
        """Return the entries of `reads` that exist in such an iteration of this configuration."""
        return tuple(
            name for name in self.reads if name == WEIGHTS or _is_of(STAGES[name], given, imitates)
        )


_PLAY = (
    "seed",
    "model.path",
    "model.chat_template",
    "model.adapter",
    "environment",
    "environments",
    "rollout.engine",
    "rollout.max_turns",
    "rollout.max_tokens_per_turn",
    "rollout.max_tokens_per_episode",
    "rollout.temperature",
    "rollout.answer_prefix",
    "rollout.stop",
    "rollout.chat_template_kwargs",
    "rollout.requests",
    "rollout.dtype",
)
"""Settings of whatever is played, for training or to evaluate."""

_SCORED = (
    "environments.reward_weight",
    "reward.functions",
    "reward.environment_weight",
    "reward.python",
    "reward.max_failed_share",
    "rollout.max_failed_share",
)
"""Settings that decide the scores of episodes."""

_CURRICULA = ("environment.curriculum", "environments.curriculum")
"""Rules that choose rows, and what counts as a success there."""

_ROLLED_OUT = (
    *_PLAY,
    "curriculum",
    *_CURRICULA,
    "rollout.max_failed_share",
    "rollout.record_routing",
    "rollout.prompts_per_iteration",
    "rollout.group_size",
    "imitation.iterations",
)
"""Settings that decide an iteration's episodes."""

_OPTIMIZER = (
    "update.schedule",
    "update.warmup_iterations",
    "update.weight_decay",
    "update.beta1",
    "update.beta2",
    "update.epsilon",
    "update.max_grad_norm",
    "update.epochs",
    "update.minibatches",
)
"""Settings of optimizer steps, whatever is trained, but for the rate."""

STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "select",
            settings=(
                "rollout",
                "experience",
                "update",
                "stages",
                "selector",
                "model.path",
                "model.adapter",
                "critic",
            ),
            makes="plan",
        ),
        Stage(
            "rollout",
            "rollout",
            reads=(WEIGHTS,),
            settings=_ROLLED_OUT,
            imitates=False,
            streams=False,
        ),
        # Which weights have played a group is known when it is sealed.
        Stage(
            "collect",
            "rollout",
            settings=_ROLLED_OUT,
            imitates=False,
            streams=True,
            told_as="rollout",
        ),
        Stage(
            "demonstrate",
            "demonstrations",
            settings=(
                "seed",
                "model.path",
                "model.chat_template",
                "environment",
                "environments",
                "rollout.answer_prefix",
                "rollout.stop",
                "rollout.prompts_per_iteration",
                "rollout.group_size",
                "imitation",
            ),
            imitates=True,
        ),
        Stage(
            "reference",
            "reference",
            reads=("rollout", "collect"),
            settings=(
                "model.path",
                "rollout.temperature",
                "update.precision",
                "algorithm.kl.reference",
                "environments.kl",
            ),
            optional="needs_reference",
            scores=True,
            joins="reference_joins",
            imitates=False,
        ),
        Stage(
            "value",
            "critic",
            reads=("rollout", "collect"),
            settings=("model.path", "update.precision", "algorithm.advantage"),
            optional="critic",
            scores=True,
            learnt_by="critic",
            imitates=False,
        ),
        Stage(
            "reward",
            "experience",
            reads=("rollout", "collect"),
            settings=_SCORED,
            imitates=False,
        ),
        Stage(
            "advantage",
            "experience",
            reads=("rollout", "collect", "reward", "reference", "value"),
            settings=("algorithm.advantage", "algorithm.kl", "environments.kl", "guard"),
            imitates=False,
        ),
        Stage(
            "update",
            "update",
            reads=("rollout", "collect", "demonstrate", "reference", "advantage"),
            settings=(
                "seed",
                "model.adapter",
                "model.freeze_routers",
                "algorithm",
                "environments.kl",
                "rollout.temperature",
                "update.precision",
                "update.learning_rate",
                *_OPTIMIZER,
                "critic.warmup_iterations",
                "imitation.iterations",
                "imitation.learning_rate",
                "imitation.minibatches",
            ),
            makes="state",
        ),
        Stage(
            "critic",
            "critic",
            reads=("rollout", "collect", "value", "advantage"),
            settings=(
                "seed",
                "critic",
                "model.freeze_routers",
                "algorithm.advantage",
                "update.precision",
                *_OPTIMIZER,
            ),
            makes="state",
            optional="critic",
            imitates=False,
        ),
        Stage("publish", "update", reads=("update",), settings=("rollout.dtype",), makes="weights"),
    )
}
"""Every stage and step of an iteration by its name, in order."""

EVALUATION = Stage(
    "evaluation",
    "rollout",
    reads=(WEIGHTS,),
    settings=(
        *_PLAY,
        "evaluation.episodes",
        "evaluation.first_episodes",
        "evaluation.temperature",
        "evaluation.options",
        "evaluation.suites",
        *_SCORED,
    ),
)
"""The stage that plays episodes between iterations; its seal lies beside those of their stages."""

STAGE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    stage.name: stage.settings for stage in (*STAGES.values(), EVALUATION)
}
"""The settings that each stage's key covers."""


TRAINED = tuple(stage.role for stage in STAGES.values() if stage.makes == "state")
"""Roles that train a model: each has a learner's handle in the run controller."""


PLAYED = ("rollout", "collect")
"""Stages that play the episodes of an iteration, or wait for them."""

ROWS = (*PLAYED, "demonstrate")
"""Stages that write the rows that an iteration works on; each iteration has one of them."""

Sealed = TypeVar("Sealed")


def rows_of(sealed: Mapping[str, Sealed]) -> Sealed:
    """Return, of what the stages of an iteration sealed, that of the one that wrote its rows."""
    return next(sealed[name] for name in ROWS if name in sealed)


def taking_part(given: Any, imitates: bool = False) -> list[Stage]:
    """The stages and steps of such an iteration of this configuration, in order."""
    return [stage for stage in STAGES.values() if _is_of(stage, given, imitates)]


def _is_of(stage: Stage, given: Any, imitates: bool) -> bool:
    """Tell whether such an iteration of this configuration has the stage."""
    return stage.takes_part(given, imitates) and stage.streams in (None, given.schedule.streams)


_WAVE = "_wave"


def in_wave(stage: str, wave: int) -> str:
    """Return the name under which a wave's part of a stage is sealed; wave 0: the whole stage's.
    Waves count from 1. They are there where `rollout.alike_groups` is not `keep`."""
    return f"{stage}{_WAVE}{wave}" if wave else stage


def stage_of(name: str) -> str:
    """Return the stage of a name that `in_wave` gives."""
    return name.partition(_WAVE)[0]


def rounds(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Sort the stages that follow `select` into rounds: the stages of a round read nothing of each
    other, so that they may run side by side; those that always take part come first.

    stages: of an iteration, each after those that it reads.
    """
    found: list[list[Stage]] = []
    after = {WEIGHTS: 0}
    for stage in stages:
        if stage.makes == "plan":
            continue
        place = max((after[name] for name in stage.reads if name in after), default=0)
        after[stage.name] = place + 1
        found += [[]] if place == len(found) else []
        found[place].append(stage)
    return [sorted(each, key=lambda stage: bool(stage.optional)) for each in found]

"""Frozen models that a run's KL penalty refers to, besides its own initial policy: teachers.

As with an ancestor, a checkpoint of another run is found before anything is written, held, and then
kept in the run directory (`references/`), so that the other run may go on or go away. Another model
directory is not copied: a link names it. The checksums of all files are compared at each start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from earl_core.config import ConfigError, RunConfig
from earl_core.config.algorithm import INITIAL
from earl_core.config.engine_models import check_trained
from earl_core.config.feasibility import expert_problem, layout_problems
from earl_core.control.ancestor import Ancestor, find_model
from earl_core.deployment.shapes import ModelShape
from earl_core.pretrained.adapter_checks import check_whole_model
from earl_core.pretrained.architecture import check_code
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.pretrained.vocabulary import vocabulary_problem
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import holding_checkpoint
from earl_core.run.kept_models import check_noted, keep, kept_record

Teachers = Mapping[str, Ancestor]
"""Models that the run directory has yet to keep, by the settings' text."""


def find_teachers(config: RunConfig) -> Teachers:
    """The teachers that the run has yet to keep.

    Raises `ConfigError` for one that is not there, and `CheckpointError` for a damaged checkpoint.
    """
    found = {}
    for text in config.references:
        if text == INITIAL or config.teacher(text).is_dir():
            continue
        found[text] = find_model(text, config)
        if found[text].pairs is not None:
            raise ConfigError(
                f"algorithm.kl.reference {text!r} has trained an adapter, and a reference is a "
                "whole model",
                remedy="export it as one (earl export RUN --to hf), and name that directory",
            )
        if not (found[text].directory / "config.json").is_file():
            raise ConfigError(
                f"algorithm.kl.reference {text!r} is not here",
                remedy="download it, and name its directory",
            )
    return found


@contextmanager
def held_teachers(config: RunConfig) -> Iterator[Teachers]:
    """`find_teachers`; checkpoints are not pruned meanwhile."""
    found = find_teachers(config)
    with ExitStack() as held:
        for each in found.values():
            if each.marker is not None:
                held.enter_context(holding_checkpoint(each.marker))
        yield found


def keep_teachers(run: RunDirectory, teachers: Teachers) -> None:
    """Keep them in the run directory, and note in its record which they were. Raises `OSError`, and
    `RunDamaged` for one that was kept and is not as it was."""
    records = {}
    for text in (text for text in run.config.references if text != INITIAL):
        place, found = run.config.teacher(text), teachers.get(text)
        records[text] = (
            kept_record(place)
            if found is None
            else keep(found.directory, place, found.record, found.sums, found.marker is None)
        )
        check_noted(place, records[text], run.record.get("references", {}).get(text))
    if records and run.record.get("references") != records:
        run.update_record(references=records)


def check_teachers(config: RunConfig, policy: Path, teachers: Teachers | None = None) -> None:
    """Raise `ConfigError` for a teacher with another vocabulary than the policy in this directory,
    that libraries take for an adapter, that nothing here computes, or that the update's deployment
    cannot be laid out for.

    teachers: those that the run has yet to keep.
    """
    own = read_model_shape(policy)
    for text, directory in _directories(config, teachers or {}).items():
        check_whole_model(directory)
        check_code(directory, config.model.trust_remote_code)
        shape = read_model_shape(directory)
        check_trained(shape)
        problem = vocabulary_problem(policy, directory, (own.vocabulary, shape.vocabulary))
        if problem:
            raise ConfigError(
                f"algorithm.kl.reference {text!r} has another vocabulary than the policy "
                f"({problem})",
                remedy="name a model with the policy's tokenizer",
            )
        _check_layout(config, text, shape)


def _check_layout(config: RunConfig, text: str, shape: ModelShape) -> None:
    """A reference stage that is no choice of its own is laid out as the update."""
    if config.selector.moves:
        return
    for key, iteration in config.stages.steps():
        update = config.stages.at(iteration)[1]
        experts = 1 if update is None or shape.experts <= 1 else update.expert_parallel
        if problem := expert_problem(shape, experts):
            raise ConfigError(
                f"algorithm.kl.reference {text!r} is laid out as {key}.update with expert_parallel "
                f"{experts}, and {problem}",
                remedy="use a degree that divides the experts of both models",
            )
        for name, degree, problem in layout_problems(shape, update) if update else ():
            raise ConfigError(
                f"algorithm.kl.reference {text!r} is laid out as {key}.update with {name} "
                f"{degree}, and {problem}",
                remedy="use a degree that divides both models, or selector.policy live_tokens",
            )


def reference_shapes(config: RunConfig, teachers: Teachers | None = None) -> tuple[ModelShape, ...]:
    """The models that the reference stage holds; none where that is the initial policy alone.

    teachers: those that the run has yet to keep.
    """
    found = _directories(config, teachers or {})
    if not found:
        return ()
    own = Path(config.initial_model.path)
    return tuple(read_model_shape(found.get(text, own)) for text in config.references)


def _directories(config: RunConfig, teachers: Teachers) -> dict[str, Path]:
    kept = {t: Path(config.reference_model(t).path) for t in config.references if t != INITIAL}
    return kept | {text: teacher.directory for text, teacher in teachers.items()}

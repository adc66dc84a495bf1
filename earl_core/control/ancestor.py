"""The ancestor of a run: the run or the model whose weights it begins with (`model.from`).

It is found before anything of the run is written, and held against pruning until the run has a copy
of its own, in `ancestor/`: `model/`, a Hugging Face directory, and `ancestor.json`, whose record is
repeated in `run.json`. Of an adapter's checkpoint it is the base, and the pairs lie in `adapter/`.
Files of a checkpoint are never written again, so the copy shares their bytes where the file system
allows it. From then on nothing of the ancestor is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError, RunConfig
from earl_core.config.model import ModelConfig
from earl_core.config.run import KEPT_ADAPTER, KEPT_ANCESTOR
from earl_core.control.policy_player import find_checkpoint
from earl_core.deployment.shapes import ModelShape
from earl_core.pretrained.adapter_directory import (
    ADAPTER_FOLDER,
    POLICY_FOLDER,
    is_adapter,
    read_adapter_config,
)
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.pretrained.vocabulary import own_template
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import holding_checkpoint, read_state
from earl_core.run.kept_models import check_noted, keep, kept_record
from earl_core.run.record import RunDamaged, lineage, read_record, stored_config


@dataclass(frozen=True)
class Ancestor:
    """Weights to begin with. directory: a model directory, or `org/name` of a model of the hub that
    is not there yet. record: what `run.json` is to say. marker: the STABLE file by which a
    checkpoint is held. sums: its files' checksums by name, as far as they are known. model: the
    model settings of the run that trained it. pairs: the directory of an adapter beside the model;
    marker and sums are then its own."""

    directory: Path
    record: Mapping[str, Any]
    marker: Path | None = None
    sums: Mapping[str, str] | None = None
    model: ModelConfig | None = None
    pairs: Path | None = None


def find_ancestor(config: RunConfig) -> Ancestor | None:
    """The ancestor of a run that has yet to get its copy; None where it has one, or needs none.

    Raises `ConfigError` for one that is not there or contradicts the run's own model settings,
    `CheckpointError` for a damaged checkpoint, and `RunDamaged` where the copy was lost.
    """
    text, run = config.model.ancestor, Path(config.runs_directory) / config.name
    if text is None or (run / KEPT_ANCESTOR).is_dir():
        return None
    if (run / "run.json").is_file() and "ancestor" in read_record(run):
        raise RunDamaged(
            f"{run / KEPT_ANCESTOR} is gone, with the weights that the run began with: put it back"
        )
    found = find_model(text, config)
    if (found.directory / "config.json").is_file():
        _check_agreement(config.model, found, text)
    return found


@contextmanager
def held_ancestor(config: RunConfig) -> Iterator[Ancestor | None]:
    """`find_ancestor`; a checkpoint is not pruned meanwhile."""
    found = find_ancestor(config)
    marker = found.marker if found is not None else None
    with holding_checkpoint(marker) if marker is not None else nullcontext():
        yield found


def beginning(config: RunConfig, ancestor: Ancestor | None = None) -> RunConfig:
    """A configuration whose `model` is the one of policy version 0, where it lies now.

    ancestor: what `find_ancestor` has found; it is asked where none is given.
    """
    found = ancestor or find_ancestor(config)
    model = config.model.at(found.directory) if found is not None else config.initial_model
    if found is not None and found.pairs is not None:
        model = model.beginning_with(found.pairs)
    return config.model_copy(update={"model": model})


def keep_ancestor(run: RunDirectory, ancestor: Ancestor | None) -> None:
    """Give the run its copy of the ancestor's model, and of its pairs where it is an adapter's,
    whole or not at all, and the record of it.

    ancestor: None where the run need have none, or has its copy, which is checked. Raises `OSError`
    and `RunDamaged`.
    """
    place = run.path / KEPT_ANCESTOR
    if ancestor is not None and (ancestor.directory / "config.json").is_file():
        record = _kept(run.path, ancestor)
    elif place.is_dir():
        record = kept_record(place)
    else:
        return
    _note(run, place, "ancestor", record)


def keep_adapter(run: RunDirectory) -> None:
    """Give the run its copy of the adapter that it begins with, or check that it has it; call
    `keep_ancestor` before. Raises `OSError` and `RunDamaged`."""
    adapter, place = run.config.model.adapter, run.path / KEPT_ADAPTER
    if place.is_dir():
        record = kept_record(place)
    elif adapter is not None and adapter.source is not None:
        told = {"from": adapter.source, "path": str(Path(adapter.source).resolve())}
        record = keep(Path(adapter.source), place, told)
    elif "adapter" in run.record or "pairs" in run.record.get("ancestor", {}):
        raise RunDamaged(
            f"{place} is gone, with the pairs that the run began with: put it back as it was"
        )
    else:
        return
    _note(run, place, "adapter", record)


def _kept(run: Path, ancestor: Ancestor) -> dict[str, Any]:
    """Copy what the run begins with; the record of it. The model is last: where it is, all is."""
    record, sums = dict(ancestor.record), ancestor.sums
    if ancestor.pairs is not None:
        place = run / KEPT_ADAPTER
        shutil.rmtree(place, ignore_errors=True)  # of a start that was killed here
        told = {"from": record["from"], "path": str(ancestor.pairs.resolve())}
        record["pairs"] = keep(ancestor.pairs, place, told, sums)["digest"]
        sums = None
    return keep(ancestor.directory, run / KEPT_ANCESTOR, record, sums)


def _note(run: RunDirectory, place: Path, name: str, record: dict[str, Any]) -> None:
    noted = run.record.get(name)
    check_noted(place, record, noted)
    if noted is None:
        run.update_record(**{name: record})


def find_model(text: str, config: RunConfig) -> Ancestor:
    """The model that a text names: of a run's checkpoint, of a directory or of the hub. Raises as
    `find_ancestor` does."""
    named = _run_of(text, Path(config.runs_directory))
    if named is not None:
        return _checkpoint_of(*named, text)
    if (Path(text) / "config.json").is_file():
        return Ancestor(Path(text), _record(text, Path(text).resolve()))
    below = Path(text).parent.resolve() == Path(config.runs_directory).resolve()
    if config.model.at(text).from_hub and not below:
        return Ancestor(Path(text), _record(text, text))
    known = sorted(path.parent.name for path in Path(config.runs_directory).glob("*/config.yaml"))
    listed = f"it holds {', '.join(known)}" if known else "it holds no runs"
    raise ConfigError(
        f"there is no model {text!r}",
        remedy=f"name a run of {config.runs_directory}/ ({listed}), the directory of a run or of a "
        "model, or `org/name` of the model hub",
    )


def _run_of(text: str, runs_directory: Path) -> tuple[Path, str] | None:
    """Run directory and checkpoint that a text names; None: it names no run."""
    before, _, after = text.rpartition("@")
    for name, which in ((text, "last"), (before, after)):
        for path in (Path(name), runs_directory / name) if name else ():
            if (path / "config.yaml").is_file():
                return path, which
    # A checkpoint's own directory, or its policy's.
    path = Path(text).resolve()
    path = path.parent if path.name in (POLICY_FOLDER, ADAPTER_FOLDER) else path
    run = path.parent.parent
    if path.parent.name == "checkpoints" and path.name.isdigit() and (run / "run.json").is_file():
        return run, str(int(path.name))
    return None


def _checkpoint_of(run: Path, which: str, text: str) -> Ancestor:
    """The weights of a run's checkpoint: the one place that decides which kind they are."""
    config = stored_config(run)
    found = find_checkpoint(run, config, which)
    pairs = found.policy if is_adapter(found.policy) else None
    directory = found.policy if pairs is None else Path(config.initial_model.path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory}, the model beside which {text} has trained an adapter, is not there (any "
            "more)",
            remedy="put it back as it was",
        )
    listed = read_state(found.policy.parent)["files"] if found.marker is not None else {}
    inside = f"{found.policy.name}/"
    sums = {
        name.removeprefix(inside): entry["xxh3"]
        for name, entry in listed.items()
        if name.startswith(inside)
    }
    own = read_record(run)
    model = {"path": config.model.path, "builder": config.model.builder}
    record = {
        **_record(text, run.resolve()),
        "uid": own["uid"],
        "iteration": int(found.policy.parent.name) if found.marker is not None else None,
        "policy_version": found.version,
        "model": model,
        "ancestors": [{k: v for k, v in each.items() if k != "ancestors"} for each in lineage(own)],
    }
    return Ancestor(directory, record, found.marker, sums or None, config.model, pairs)


def _check_adapters(model: ModelConfig, text: str, pairs: Path) -> None:
    """Raise `ConfigError` where the settings say nothing of the ancestor's pairs, or name others;
    whether rank, alpha and targets are theirs is asked as of any adapter's."""
    if model.adapter is None:
        held = read_adapter_config(pairs)
        raise ConfigError(
            f"{text} has trained an adapter (rank {held['r']}, alpha {held['lora_alpha']}), and "
            "model.adapter is missing",
            remedy="give model.adapter the settings of that run, or train all weights: export it "
            "(earl export RUN --to hf) and begin from that directory",
        )
    if model.adapter.source is not None:
        raise ConfigError(
            f"model.adapter.from {model.adapter.source!r} names other pairs than those of {text}, "
            "which the run begins with",
            remedy="leave model.adapter.from out",
        )


def _record(text: str, path: Path | str) -> dict[str, Any]:
    return {"from": text, "name": Path(path).name, "path": str(path), "ancestors": []}


def _check_agreement(model: ModelConfig, found: Ancestor, text: str) -> None:
    """Raise `ConfigError` for a model setting that contradicts the ancestor."""
    theirs = found.model
    if found.pairs is not None:
        _check_adapters(model, text, found.pairs)
    if model.path and (Path(model.path) / "config.json").is_file():
        own, held = read_model_shape(Path(model.path)), read_model_shape(found.directory)
        for name in ModelShape.model_fields:
            one, other = getattr(own, name), getattr(held, name)
            if one != other:
                raise ConfigError(
                    f"model.path {model.path!r} is another model than {text} holds: {name} is "
                    f"{one} there and {other} here",
                    remedy="leave model.path out, or begin from a model of that shape",
                )
    elif theirs is not None and theirs.ancestor is None and model.maker is not None:
        for name in ("builder", "builder_options") if model.builder else ("path",):
            if name in model.model_fields_set and getattr(model, name) != getattr(theirs, name):
                raise ConfigError(
                    f"model.{name} makes another model than the one that {text} began with",
                    remedy=f"leave it out, or give the value of that run "
                    f"({getattr(theirs, name)!r})",
                )
    if theirs is not None:
        _check_template(model.chat_template, found, theirs.chat_template, text)


def _check_template(given: str | None, found: Ancestor, theirs: str | None, text: str) -> None:
    """given, theirs: files of templates that the settings of the run and of its ancestor name. A
    whole model's checkpoint holds the template, an adapter's does not."""
    apart = theirs is not None and found.pairs is not None
    if given is None and apart:
        raise ConfigError(
            f"{text} was trained with model.chat_template {theirs!r}, which does not lie beside "
            "the pairs of an adapter",
            remedy="give it, too",
        )
    if given is None or not Path(given).is_file() or (apart and not Path(str(theirs)).is_file()):
        return
    told = Path(str(theirs)).read_text("utf-8") if apart else own_template(found.directory)
    if Path(given).read_text("utf-8").strip() != told.strip():
        advice = f"give {theirs}" if apart else "leave it out: the template comes with the weights"
        raise ConfigError(
            f"model.chat_template {given!r} is another one than {text} was trained with",
            remedy=advice,
        )

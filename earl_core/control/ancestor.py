"""The ancestor of a run: the run or the model whose weights it begins with (`model.from`).

It is found before anything of the run is written, and held against pruning until the run has a copy
of its own, in `ancestor/`: `model/`, a Hugging Face directory, and `ancestor.json`, whose record is
repeated in `run.json`. Files of a checkpoint are never written again, so the copy shares their
bytes where the file system allows it. From then on nothing of the ancestor is needed.
"""

from __future__ import annotations

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
from earl_core.pretrained.adapter_directory import ADAPTER_FOLDER, POLICY_FOLDER
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
    model settings of the run that trained it."""

    directory: Path
    record: Mapping[str, Any]
    marker: Path | None = None
    sums: Mapping[str, str] | None = None
    model: ModelConfig | None = None


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
    return config.model_copy(update={"model": model})


def keep_ancestor(run: RunDirectory, ancestor: Ancestor | None) -> None:
    """Give the run its copy of the ancestor's model, whole or not at all, and the record of it.

    ancestor: None where the run need have none, or has its copy, which is checked. Raises `OSError`
    and `RunDamaged`.
    """
    place = run.path / KEPT_ANCESTOR
    if ancestor is not None and (ancestor.directory / "config.json").is_file():
        record = keep(ancestor.directory, place, ancestor.record, ancestor.sums)
    elif place.is_dir():
        record = kept_record(place)
    else:
        return
    _note(run, place, "ancestor", record)


def keep_adapter(run: RunDirectory) -> None:
    """Give the run its copy of the adapter that it begins with, or check that it has it. Raises
    `OSError` and `RunDamaged`."""
    adapter = run.config.model.adapter
    if adapter is None or adapter.source is None:
        return
    place, source = run.path / KEPT_ADAPTER, Path(adapter.source)
    told = {"from": adapter.source, "path": str(source.resolve())}
    record = kept_record(place) if place.is_dir() else keep(source, place, told)
    _note(run, place, "adapter", record)


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
    if not (found.policy / "config.json").is_file():
        raise ConfigError(
            f"{found.policy} holds no whole model",
            remedy=f"export it as one (earl export {run.name} --to hf) and name that, or go on "
            "with the adapter: give its directory as model.adapter.from, and the model beside "
            "which it was trained as model.path",
        )
    listed = read_state(found.policy.parent)["files"] if found.marker is not None else {}
    sums = {
        name.removeprefix("policy/"): entry["xxh3"]
        for name, entry in listed.items()
        if name.startswith("policy/")
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
    return Ancestor(found.policy, record, found.marker, sums or None, config.model)


def _record(text: str, path: Path | str) -> dict[str, Any]:
    return {"from": text, "name": Path(path).name, "path": str(path), "ancestors": []}


def _check_agreement(model: ModelConfig, found: Ancestor, text: str) -> None:
    """Raise `ConfigError` for a model setting that contradicts the ancestor."""
    theirs = found.model
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
    if theirs is None or model.chat_template is None:
        return
    if Path(model.chat_template).is_file():
        own_text = Path(model.chat_template).read_text(encoding="utf-8")
        if own_text.strip() != own_template(found.directory).strip():
            raise ConfigError(
                f"model.chat_template {model.chat_template!r} is another one than {text} was "
                "trained with",
                remedy="leave it out: the template comes with the weights",
            )

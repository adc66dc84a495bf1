"""Checks of a run file: its model, its environment, its run directory.

The parts yield findings and raise `ConfigError` for what a run would refuse, so that `earl train`
refuses the same as `earl doctor` shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from earl_core.config import RunConfig, check_references
from earl_core.config.code import named_code
from earl_core.config.feasibility import check_devices, check_stages, engines_of_a_host
from earl_core.config.gateway import check_gateway
from earl_core.config.redaction import redaction_of
from earl_core.control.ancestor import beginning
from earl_core.control.hardware import expected_hardware
from earl_core.control.precision import resolved
from earl_core.control.preflight import check_expected, whole_model
from earl_core.control.routing_checks import routing_warning
from earl_core.control.selector_policy import settled
from earl_core.control.teachers import check_teachers, find_teachers, reference_shapes
from earl_core.deployment.shapes import ModelShape
from earl_core.environments.hosting.check import check_environments
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.lock import is_locked
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.finding import Finding, refused
from earl_core.system.import_path import is_foreign, only_looks
from earl_core.system.outside import read_text
from earl_core.system.plural import plural
from tasks.tracking.mlflow_client import default_database


def check_configuration(config: RunConfig) -> Iterator[Finding]:
    """Everything that the run would refuse at its start, the shape of the model, and the policy."""
    yield Finding("good", f"{config.name}: {plural(config.iterations, 'iteration')}")
    try:
        begins = beginning(config)
    except EarlError as error:
        yield refused(error)
        return
    fits = True
    # What lies where follows from the placement; `environment` says what was not imported.
    unseen = only_looks() and is_foreign(config.stages.division.placement)
    for part in (places, references, gateway, model, teachers, stages, environment):
        if unseen and part in (gateway, stages):
            continue
        try:
            yield from part(begins)
        except ConfigError as error:
            fits = False
            yield refused(error)
    if fits and not unseen:
        try:
            yield from policy(config, begins)
        except EarlError as error:
            yield refused(error)
    run = Path(config.runs_directory) / config.name
    if is_locked(run):
        yield Finding("warning", f"{run} is in use", "wait for it, or use another --name")
    elif (run / "config.yaml").is_file():
        yield Finding("note", f"{run} exists: `earl train` would go on with it")


def precision(config: RunConfig, run: Path) -> tuple[RunConfig, list[Finding]]:
    """The configuration with what `auto` is here, or was when the run began, and what is slow."""
    if config.cluster.backend != "local":
        return config, []  # only its hosts know
    found = resolved(config, run=run)
    said = [Finding("note", text) for text in found.said]
    advice = "name another, or leave it to `auto`"
    return found.config, said + [Finding("warning", text, advice) for text in found.warnings]


def policy(config: RunConfig, begins: RunConfig) -> Iterator[Finding]:
    """Say what `auto` is here for `selector.policy`, or was when the run began, and why, in the
    words of the start. The precision is settled. begins: with the model that it begins with."""
    if config.cluster.backend != "local":
        return  # only its hosts know
    shape, teachers = None, tuple[ModelShape, ...]()
    if (Path(begins.model.path) / "config.json").is_file():
        shape = read_model_shape(Path(begins.initial_model.path))
        teachers = reference_shapes(begins, find_teachers(begins))
    found = settled(config, expected_hardware(config), shape, teachers)
    if found.config.selector.policy == "auto":
        yield Finding("note", "selector.policy is chosen at the start, once the model is here")
    said: list[str] = []
    found.tell(said.append)
    yield from (Finding("note", text) for text in said)


def places(config: RunConfig) -> Iterator[Finding]:
    """Check that databases can lie among the runs."""
    default_database(config.runs_directory)
    yield from ()


def references(config: RunConfig) -> Iterator[Finding]:
    """Check that every secret can be had, and rules of redaction."""
    check_references(config)
    redaction_of(config)
    yield from ()


def gateway(config: RunConfig) -> Iterator[Finding]:
    """Check that agents elsewhere could connect."""
    suites = config.evaluation.suites
    hardware, played = expected_hardware(config), [*config.played.values(), *suites]
    engines = engines_of_a_host(config, hardware)
    check_gateway(config.rollout.gateway, played, hardware.hosts, engines)
    yield from ()


def model(config: RunConfig) -> Iterator[Finding]:
    """Check that the model is there, whole and readable, or can be made."""
    path, template = Path(config.model.path), config.model.chat_template
    if (path / "config.json").is_file():
        _check_files(path, config.rollout.engine)
        shape = whole_model(config)
        if text := routing_warning(config, shape):
            yield Finding("warning", text)
        weights = [*path.glob("*.safetensors")] or path.glob("pytorch_model*.bin")
        size = sum(file.stat().st_size for file in weights)
        yield Finding(
            "good",
            f"model {path}: {shape.model_type}, {shape.layers} layers, {size / 2**20:.0f} MiB, "
            f"up to {shape.max_positions} positions",
        )
    elif config.model.builder:
        text = f"the model {path} is made at the first start, by {config.model.builder}"
        yield Finding("note", text)
    elif config.model.maker:
        text = f"{path} is no directory here: it is downloaded from the model hub at the start"
        yield Finding("note", text)
    else:
        raise ConfigError(
            f"model.path {str(path)!r} is not a model directory (no config.json), and there is no "
            "model.builder that could make it",
            remedy="correct model.path, or prepare the model first",
        )
    if template is not None and not Path(template).is_file():
        raise ConfigError(
            f"model.chat_template {template!r} is not a file", remedy="correct the path"
        )


_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer*", "tokenization_*.py", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_WEIGHTS = {"vllm": ("*.safetensors",), "torch": ("*.safetensors", "pytorch_model*.bin")}


def _check_files(path: Path, engine: str) -> None:
    """Raise `ConfigError` for the first thing without which workers that load the directory `path`
    (it has a config.json) would fail; looks at names of files only. engine: `vllm` or `torch`."""
    if not _any(path, _WEIGHTS[engine]):
        if engine == "vllm" and _any(path, _WEIGHTS["torch"]):
            raise ConfigError(
                f"{path} has no safetensors weights, and rollout.engine=vllm reads no others",
                remedy="copy model.safetensors into it, or set rollout.engine=torch",
            )
        advice = "copy model.safetensors into it, or correct model.path"
        raise ConfigError(f"{path} has no weights", remedy=advice)
    if absent := _absent_parts(path):
        raise ConfigError(
            f"{path} lacks {len(absent)} of the weight files in its index, such as {absent[0]}",
            remedy="copy them into it; a download may have stopped half-way",
        )
    if not _any(path, _TOKENIZERS):
        advice = "copy the tokenizer's files into it, such as tokenizer.json"
        raise ConfigError(f"{path} has no tokenizer", remedy=advice)


def _any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(file.is_file() for pattern in patterns for file in path.glob(pattern))


def _absent_parts(path: Path) -> list[str]:
    try:
        index = json.loads(read_text(path / _INDEX, str(path / _INDEX)))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [name for name in names if not (path / name).is_file()]


def teachers(config: RunConfig) -> Iterator[Finding]:
    """Check that the frozen models are there and have the policy's vocabulary."""
    found = find_teachers(config)
    path = Path(config.initial_model.path)
    if (path / "config.json").is_file():
        check_teachers(config, path, found)
    yield from ()


def stages(config: RunConfig) -> Iterator[Finding]:
    """Check that the stage deployments are possible here, and for a model that is there already."""
    hardware = expected_hardware(config)
    check_devices(config, hardware)
    shape = None
    with suppress(ConfigError):  # the model's own part says it
        shape = read_model_shape(Path(config.model.path))
    if shape is not None:
        check_stages(config, shape, hardware)
    else:
        check_expected(config, hardware)
    yield from ()


def environment(config: RunConfig) -> Iterator[Finding]:
    """Make the environments once, in a process of their own; runs the user's code, unless the
    command only looks."""
    if only_looks() and (named := named_code(config)):
        shown = ", ".join(f"{key} ({value})" for key, value in named.items())
        text = f"the run file names code, which was not imported: {shown}"
        yield Finding("note", text, "if you trust it: earl doctor RUN.yaml --run-code")
        return
    notes = asyncio.run(check_environments(config)).notes
    names = ", ".join(each.played for each in config.played.values())
    yield Finding("good", f"environment {names}")
    for note in notes:
        yield Finding("warning", note)

"""What a run file needs: its model, its environment, its run directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from earl_core.config import ConfigError, RunConfig, check_references
from earl_core.control.hardware import read_hardware, read_model_shape
from earl_core.deployment.feasibility import check_devices, check_layout
from earl_core.environments.base import EnvironmentConfigError
from earl_core.environments.registry import check as check_environment
from earl_core.run.lock import is_locked
from flows.cli.checks.finding import Finding
from flows.cli.checks.model import missing_files

TOPIC = "Run file"


def check_configuration(config: RunConfig) -> Iterator[Finding]:
    """Everything that the run would refuse at its start, and the shape of the model."""
    yield Finding("good", TOPIC, f"{config.name}: {config.iterations} iterations")
    yield from _references(config)
    yield from _model(config)
    yield from _layout(config)
    environment = config.environment
    try:
        check_environment(environment.name, environment.options)
        yield Finding("good", TOPIC, f"environment {environment.name}")
    except EnvironmentConfigError as error:
        yield Finding("blocks", TOPIC, str(error), "correct the environment section")
    run = Path(config.runs_directory) / config.name
    if is_locked(run):
        yield Finding("warning", TOPIC, f"{run} is in use", "wait for it, or use another --name")
    elif (run / "config.yaml").is_file():
        yield Finding("note", TOPIC, f"{run} exists: `earl train` would go on with it")


def _references(config: RunConfig) -> Iterator[Finding]:
    try:
        check_references(config)
    except ConfigError as error:
        yield Finding("blocks", TOPIC, str(error), "give the secret, or correct the reference")


def _model(config: RunConfig) -> Iterator[Finding]:
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        if config.model.from_hub:
            text = f"{path} is no directory here: it is downloaded from the model hub at the start"
            yield Finding("note", TOPIC, text)
        elif config.model.builder:
            text = f"the model {path} is made at the first start, by {config.model.builder}"
            yield Finding("note", TOPIC, text)
        else:
            advice = "correct model.path, or prepare the model first"
            yield Finding("blocks", TOPIC, f"{path} is not a model directory", advice)
        return
    try:
        shape = read_model_shape(path)
    except ConfigError as error:
        yield Finding("blocks", TOPIC, str(error), "repair the model directory")
        return
    missing = missing_files(path, config.rollout.engine)
    if missing is not None:
        yield Finding("blocks", TOPIC, missing.text, missing.advice)
    else:
        weights = [*path.glob("*.safetensors")] or path.glob("pytorch_model*.bin")
        size = sum(file.stat().st_size for file in weights)
        text = (
            f"model {path}: {shape.model_type}, {shape.layers} layers, {size / 2**20:.0f} MiB, "
            f"up to {shape.max_positions} positions"
        )
        yield Finding("good", TOPIC, text)


def _layout(config: RunConfig) -> Iterator[Finding]:
    hardware = read_hardware()
    try:
        check_devices(config, hardware)
        try:
            shape = read_model_shape(Path(config.model.path))
        except ConfigError:
            return  # said of the model already
        check_layout(config, shape, hardware)
    except ConfigError as error:
        yield Finding("blocks", TOPIC, str(error), "correct the layout section")

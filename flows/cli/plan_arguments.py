"""Arguments of `earl plan`: a model, hardware and contexts by their names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer

from earl_core.deployment.layer_shapes import AdapterShape
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.selector.model.catalogue import MODELS, known_model
from earl_core.selector.model.devices import DEVICES, cluster, find_devices
from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text
from earl_core.system.similar import meant

_READ = {
    "--memory": "hardware",
    "RUN@ITERATION": "run explain runs_directory",
    "RUNFILE": "run explain runs_directory overrides hardware model context run_code",
    "no run": "explain model hardware context responses running engine_share reference staleness "
    "adapter",
}
"""Parameters that `earl plan` reads, by what it is asked."""


def refuse_unread(command: typer.Context, run: str | None, memory: bool) -> None:
    """Raise `ConfigError` for what was given on the command line and would change nothing."""
    form = "no run" if run is None else "RUN@ITERATION" if "@" in run else "RUNFILE"
    form = "--memory" if memory else form
    read = {*_READ[form].split(), "memory", "as_json", "debug"}
    for parameter in command.command.params:
        name = parameter.name or ""
        source = command.get_parameter_source(name)
        if name not in read and source is not None and source.name == "COMMANDLINE":
            given = "RUN" if name == "run" else parameter.opts[0]
            why = ", which is as its run sealed it" if form == "RUN@ITERATION" else ""
            raise ConfigError(
                f"{given} changes nothing of what earl plan says with {form}{why}: leave it out"
            )


def find_model(name: str, adapter: AdapterShape | None = None) -> ModelShape:
    """A well-known shape by name, or that of a directory with a config.json, with an adapter.
    Raises `ConfigError` for neither, and for an adapter that nothing trains."""
    shape = known_model(name) or _shape_in(name)
    if adapter is None:
        return shape
    if shape.experts > 1:
        raise ConfigError(
            f"{name} is a mixture of {shape.experts} experts, beside which no adapter is trained: "
            "leave --adapter out, or choose a dense model"
        )
    return shape.with_adapter(adapter)


def _shape_in(name: str) -> ModelShape:
    file = Path(name)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            f"--model {name!r} is neither a directory with a config.json nor one of "
            f"{', '.join(MODELS)}",
            remedy=meant(name, MODELS).strip(),
        )
    try:
        return ModelShape.from_config(json.loads(read_text(file, str(file))))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be used: {error}") from error


def find_hardware(name: str) -> Hardware:
    """`here`, a device of the catalogue (one host with 8), or that after counts: 4xh100 are the
    devices of one host, 2x8xh100 hosts and the devices of each."""
    if name == "here":
        from earl_core.control.device_figures import with_cores, with_figures
        from earl_core.control.hardware import read_hardware

        return with_cores(with_figures(read_hardware()))
    found = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([a-z].*)", name.strip().lower())
    devices = find_devices(found[3]) if found else []
    counts = [int(count) for count in found.groups()[:2] if count] if found else []
    if found is None or not devices or 0 in counts:
        raise ConfigError(
            f"--hardware {name!r} is not known: say `here`, one of {', '.join(DEVICES)}, devices x "
            "name, such as 4xh100, or hosts x devices x name, such as 16x8xh100",
            remedy=meant(found[3] if found else name, DEVICES).strip(),
        )
    return cluster(devices[0], int(found[1] or 1), int(found[2] or 8))


_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_contexts(text: str) -> list[int]:
    """`1024`, `32K`, `1.5M`, or several with commas between them; K are 1,024 tokens."""
    values = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([km]?)\s*", part.lower())
        tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if tokens < 1 or not (tokens.is_integer() or (found and found[2])):
            raise ConfigError(
                f"--context {text!r} is not a number of tokens, such as 32768, 32K, 1.5M or "
                "1K,8K,128K"
            )
        values.append(round(tokens))
    return values

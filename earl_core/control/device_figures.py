"""The figures of devices that no data sheet is known of, GPUs and the cores of a host: measured
once, in a worker, and kept."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from earl_core.cluster.host import Host, LocalHost
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config.selector import SelectorConfig
from earl_core.control.hardware import hardware_of
from earl_core.control.worker_environment import worker_environment
from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.selector.model.devices import is_known
from earl_core.system.files import read_file, write_atomic
from earl_core.system.hardware import HostResources, instruction_limit
from earl_core.system.import_path import installed

logger = logging.getLogger(__name__)

_TARGET = "earl_core.tensors.device_speed:DeviceSpeed"
_DEADLINE_SECONDS = 120.0


def with_figures(
    hardware: Hardware, hosts: Sequence[Host] = (), directory: str = "", device: str = "cuda"
) -> Hardware:
    """The hardware with the figures of its GPUs, unless the catalogue has them: those kept in the
    profile's directory, or measured on the first of the hosts.

    hosts: none: this machine. directory: "": where profiles lie unless it is configured. device:
    what torch calls it there. Raises what worker groups raise.
    """
    if is_known(hardware):
        return hardware
    # A MIG instance of another size, or a slot with fewer lanes, is another device.
    mark = f"{hardware.gpu_name} {hardware.gpu_memory_bytes >> 30} {hardware.pcie_bandwidth:.0f}"
    file = _file(Path(directory or SelectorConfig().profile_directory), mark)
    return hardware.model_copy(update={"figures": _kept(file, hosts[:1], device)})


def figures_for(
    selector: SelectorConfig, hardware: Hardware, hosts: Sequence[Host] = ()
) -> Hardware:
    """The hardware with the figures that the policy needs of it: of cores only one that chooses.

    hosts: none: this machine. Raises what worker groups raise.
    """
    if selector.moves:
        hardware = with_cores(hardware, hosts)
    return with_figures(hardware, hosts, selector.profile_directory)


def with_cores(hardware: Hardware, hosts: Sequence[Host] = ()) -> Hardware:
    """The hardware, where it has no GPUs, with what the cores of the slowest host reach together.

    hosts: none: this machine. Raises what worker groups raise.
    """
    if hardware.gpus:
        return hardware
    found = [cores_of(host) for host in distinct(hosts or [LocalHost()])]
    slowest = min(found, key=lambda each: max(each.flops, each.float32_flops))
    return hardware.model_copy(update={"figures": slowest})


def cores_of(host: Host) -> DeviceFigures:
    """Return the figures that all cores of a host reach together: kept in the home directory, or
    measured there.

    Raises what worker groups raise.
    """
    # What another torch, or fewer cores, make of the processor is another device.
    mark = f"{len(host.resources.cores)} x {host.resources.processor} torch {installed('torch')}"
    return _kept(_file(_home(), f"{mark} {instruction_limit()}".strip()), [host], "cpu")


def distinct(hosts: Sequence[Host]) -> list[Host]:
    """One host of each kind of processor: parts of a machine, and equal machines, are alike."""
    return list({_kind(host.resources): host for host in reversed(hosts)}.values())[::-1]


def _kind(site: HostResources) -> tuple[object, ...]:
    return site.processor, site.bf16, len(site.cores), site.gpu_name, site.gpu_capability


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # A user without a home has it measured at each start.
    return Path(cache if os.path.isabs(cache) else "/nonexistent") / "earl"


def _file(directory: Path, mark: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", mark.lower())
    if len(name) > 120:
        name = f"{name[:100]}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    return directory / f"device-{name}.json"


def _kept(file: Path, hosts: Sequence[Host], device: str) -> DeviceFigures:
    try:
        return DeviceFigures.model_validate_json(read_file(file))
    except FileNotFoundError:
        figures = _measured(hosts, device)
        # A directory that cannot be written costs a measurement at the next start.
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, figures.model_dump_json(indent=1).encode(), 0o644)
    except (OSError, ValidationError):
        logger.warning(
            "%s does not hold the figures of a device, so it stays as it is, and the device is "
            "measured at each start: move the file away to have the measurement kept",
            file,
        )
        figures = _measured(hosts, device)
    return figures


def _measured(hosts: Sequence[Host], device: str) -> DeviceFigures:
    hardware = hardware_of(hosts := list(hosts) or [LocalHost()])
    environment = worker_environment("device", hardware.cpu_cores, hardware)
    with tempfile.TemporaryDirectory(prefix="earl-device-") as logs:
        group = WorkerGroup("device", _TARGET, log_directory=Path(logs), environment=environment)
        try:
            group.start({}, {"device": device}, 1, hosts)
            (found,) = group.call(
                "measure", stage="", iteration=0, deadline_seconds=_DEADLINE_SECONDS
            )
        finally:
            group.stop()
    return DeviceFigures.model_validate(found)

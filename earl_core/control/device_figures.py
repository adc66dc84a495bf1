"""The figures of GPUs that no data sheet is known of: measured once, in a worker, and kept."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from earl_core.cluster.host import Host
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config.selector import SelectorConfig
from earl_core.deployment.shapes import DeviceFigures, Hardware
from earl_core.selector.model.devices import is_known
from earl_core.system.files import read_file, write_atomic

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
    mark = re.sub(r"[^a-z0-9]+", "-", mark.lower())
    file = Path(directory or SelectorConfig().profile_directory) / f"device-{mark}.json"
    try:
        figures = DeviceFigures.model_validate_json(read_file(file))
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
    return hardware.model_copy(update={"figures": figures})


def _measured(hosts: Sequence[Host], device: str) -> DeviceFigures:
    with tempfile.TemporaryDirectory(prefix="earl-device-") as logs:
        group = WorkerGroup("device", _TARGET, log_directory=Path(logs))
        try:
            group.start({}, {"device": device}, 1, list(hosts[:1]) or None)
            (found,) = group.call(
                "measure", stage="", iteration=0, deadline_seconds=_DEADLINE_SECONDS
            )
        finally:
            group.stop()
    return DeviceFigures.model_validate(found)

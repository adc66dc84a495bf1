"""The value of `auto` for `selector.policy`: decided once for a run, when it begins.

A run keeps what it began with: its `config.yaml` holds the policy's name, and a run of a release
without `auto` goes on under `fixed`. What is decided never refuses a run that `fixed` would start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from earl_core.cluster.host import Host
from earl_core.config import RunConfig
from earl_core.control.device_figures import figures_for
from earl_core.control.machine_profile import profile_of
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stages import SELECTABLE
from earl_core.run import RunDirectory
from earl_core.run.record import RunDamaged, read_record
from earl_core.selector.choice.automatic import (
    configured_layout,
    no_plan,
    under_live_tokens,
    unknown_speeds,
)
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.profile_table import ProfileError, ProfileTable
from earl_core.system.memory import memory_in_use

_AS_BEGUN = "as the run began"
RECORD = "selector"
"""The entry of `run.json` that says what was decided, and why."""


class Settled(NamedTuple):
    """config: without `auto`, unless what decides is not there yet. why: a clause; empty: nobody
    had to decide."""

    config: RunConfig
    why: str = ""

    def tell(self, say: Callable[[str], object]) -> None:
        """Say what was chosen, and why."""
        if self.why:
            say(f"selector.policy {self.config.selector.policy}: {self.why}")

    def keep(self, run: RunDirectory) -> None:
        """Have the run's record say what was decided when it began."""
        if self.why and self.why != _AS_BEGUN:
            run.update_record(**{RECORD: {"auto": self.config.selector.policy, "why": self.why}})


def settled(
    config: RunConfig,
    hardware: Hardware,
    model: ModelShape | None,
    references: Sequence[ModelShape] = (),
    hosts: Sequence[Host] = (),
) -> Settled:
    """The configuration with what `auto` is: in a run that exists what it began with.

    The precision is settled. model: None: it is not there yet, which leaves `auto` where only the
    model can tell. references: the models of the reference stage. hosts: none: this machine. Raises
    what worker groups raise, if a device has to be measured.
    """
    if config.selector.policy != "auto":
        return Settled(config)
    began = _began(Path(config.runs_directory) / config.name)
    if began != "auto":
        return _going_on(config, began)
    why = configured_layout(config, hardware)
    profile = ProfileTable()
    if not why:
        why, profile = _measured(config, hardware, model)
    if why:
        return Settled(_with(config, "fixed"), why)
    if model is None:
        return Settled(config)
    live = _with(config, "live_tokens")
    held = {} if hardware.gpus else dict.fromkeys(SELECTABLE, float(memory_in_use()))
    given = SelectionInput.of(
        live,
        figures_for(live.selector, hardware, hosts),
        model,
        reference_models=tuple(references),
        iterations_left=config.iterations,
        reserved_bytes=held,
        profile=profile,
    )
    if why := no_plan(given):
        return Settled(_with(config, "fixed"), why)
    kind = "GPUs" if hardware.gpus else "cores"
    return Settled(live, f"there are {hardware.devices} {kind} to lay the stages out on")


def reason_in(run: RunDirectory) -> str:
    """Return why the run's policy is what it is; empty where the run file names it."""
    decided = run.record.get(RECORD, {})
    policy = run.config.selector.policy
    return f"auto: {decided['why']}" if decided.get("auto") == policy else ""


def _measured(
    config: RunConfig, hardware: Hardware, model: ModelShape | None
) -> tuple[str, ProfileTable]:
    """Return why too little is known of the devices, or empty, and what is."""
    if model is None:
        # GPUs have data sheets; of a model that is not made yet no cores were measured.
        return "" if hardware.gpus else unknown_speeds(ProfileTable()), ProfileTable()
    try:
        profile = profile_of(config, hardware, model)[2]
    except ProfileError as error:
        return str(error), ProfileTable()
    return "" if hardware.gpus else unknown_speeds(profile), profile


def _going_on(config: RunConfig, began: str) -> Settled:
    """What a run goes on with; `fixed`, where what has changed since lays it out."""
    goes_on = _with(config, began)
    try:
        goes_on.selector.check_stages(config.stages, goes_on, config.schedule.staleness)
    except ValueError:
        return Settled(_with(config, "fixed"), "`stages` lays the run out now")
    return Settled(goes_on, _AS_BEGUN)


def _with(config: RunConfig, policy: str) -> RunConfig:
    if policy == "live_tokens":
        return config.model_copy(update={"selector": under_live_tokens(config)})
    selector = config.selector.model_copy(update={"policy": policy})
    return config.model_copy(update={"selector": selector})


def _began(run: Path) -> str:
    """Return the policy that a run was last worked with; `auto`: nothing was chosen for it yet."""
    chosen = ("iterations/*/select.json", "checkpoints/*/STABLE")
    if not any(any(run.glob(each)) for each in chosen):
        return "auto"
    # Whoever opens the run says what is wrong with it.
    with suppress(FileNotFoundError, RunDamaged):
        settings = read_record(run).get("settings", {})
        return str(settings.get("selector", {}).get("policy", "auto"))
    return "auto"
